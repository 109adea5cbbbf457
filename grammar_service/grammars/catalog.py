"""The compiled grammars of this replica: one compile for equal specs, and a bounded cache.

A compile goes on as long as one of its callers waits, whichever began it. A live sequence pins its
grammar: eviction takes the least recently used one without sequences.
"""

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from engine_client.spec import GrammarSpec
from engine_client.vocabulary import Vocabulary
from grammar_service import metrics
from grammar_service.backends import Backend
from grammar_service.backends.base import Compiled
from grammar_service.errors import Cancelled, Invalid, NotFound, ServiceError, Unenforced
from grammar_service.grammars.children import Artifact, CompileChildren
from grammar_service.grammars.spec import grammar_id as grammar_id_of

_MAX_REFUSAL_BYTES = 4 << 20
_MAX_ARTIFACT_BYTES = 64 << 20
"""Loading one holds the interpreter for milliseconds a megabyte, and steps with it."""


@dataclass(slots=True, eq=False)
class Grammar:
    """A compiled grammar, ready to make matchers."""

    id: str
    spec: GrammarSpec
    vocabulary: Vocabulary
    backend: Backend
    compiled: Compiled
    memory_bytes: int
    compile_ms: float
    unenforced: tuple[Unenforced, ...]
    annotations: tuple[Unenforced, ...]
    compiled_source: str
    pins: int = field(default=0)
    """Live sequences; guarded by the catalog's lock."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A compile that runs, and a future for each caller who waits for it."""

    spec: GrammarSpec
    vocabulary: Vocabulary
    artifact: Future[Artifact]
    waiting: set[Future[Grammar]] = field(default_factory=set)
    """Guarded by the catalog's lock."""


class Catalog:
    """Compiles specs and holds what came of them. Thread-safe."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        children: CompileChildren,
        max_bytes: int,
    ) -> None:
        self._backends = backends
        self._children = children
        self._max_bytes = max_bytes
        self._bytes = 0
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._flights: dict[str, _Flight] = {}
        self._refusals: OrderedDict[str, Invalid] = OrderedDict()
        """What a spec itself is the reason of; never a deadline, a kill or a crash."""
        self._refusal_bytes = 0
        self._lock = threading.Lock()

    def compile(
        self,
        spec: GrammarSpec,
        vocabulary: Vocabulary,
        when_gone: Callable[[Callable[[], None]], bool],
    ) -> tuple[Grammar, bool]:
        """The grammar of a canonical spec, and whether it was held before. Waits for a compile.

        `when_gone` takes what is to be called once the caller is gone, on any thread; False if it
        is gone already.

        Raises a ServiceError: Invalid, DeadlineExceeded, Exhausted, Cancelled or Internal.
        """
        grammar_id = grammar_id_of(spec, vocabulary.id, self._versions(spec))
        with self._lock:
            held = self._grammars.get(grammar_id)
            if held is not None:
                self._grammars.move_to_end(grammar_id)
                metrics.COMPILES.labels("cached").inc()
                return held, True
            refusal = self._refusals.get(grammar_id)
            if refusal is not None:
                metrics.COMPILES.labels("refusal_cached").inc()
                raise Invalid(refusal.reason, refusal.message, refusal.unenforced)
            flight = self._flights.get(grammar_id)
            joined = flight is not None
            if flight is None:
                flight = self._flights[grammar_id] = self._begin(spec, vocabulary)
            waiter = Future[Grammar]()
            flight.waiting.add(waiter)
        if joined:
            metrics.COMPILES.labels("joined").inc()
        else:
            flight.artifact.add_done_callback(lambda _: self._land(grammar_id, flight))
        leave = functools.partial(self._leave, grammar_id, waiter)
        if not when_gone(leave):
            leave()
        try:
            return waiter.result(), joined
        except CancelledError:
            raise Cancelled("CANCELLED", "the caller is gone") from None

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Makes ready for compiles over a vocabulary, here and in the children."""
        self._children.warm(vocabulary)
        for backend in self._backends.values():
            backend.prepare(vocabulary)

    def get(self, grammar_id: str) -> Grammar:
        """The grammar of that id. Raises NotFound with UNKNOWN_GRAMMAR."""
        with self._lock:
            grammar = self._grammars.get(grammar_id)
            if grammar is None:
                raise _unknown(grammar_id)
            self._grammars.move_to_end(grammar_id)
            return grammar

    def pin(self, grammar_id: str) -> Grammar:
        """Like `get`, for a sequence that keeps the grammar until it unpins it."""
        with self._lock:
            grammar = self._grammars.get(grammar_id)
            if grammar is None:
                raise _unknown(grammar_id)
            self._grammars.move_to_end(grammar_id)
            grammar.pins += 1
            return grammar

    def unpin(self, grammar: Grammar) -> None:
        """Gives a pin back."""
        with self._lock:
            grammar.pins -= 1

    def _versions(self, spec: GrammarSpec) -> str:
        """The libraries that the spec may come to, for its id. Raises Invalid.

        For `auto` those are all that are allowed here: a replica that allows others may pick
        another one, and gives that grammar another id.
        """
        if spec.backend == "auto":
            return ",".join(f"{name} {b.version}" for name, b in sorted(self._backends.items()))
        backend = self._backends.get(spec.backend)
        if backend is None:
            raise Invalid(
                "SPEC_UNSUPPORTED",
                f"backend {spec.backend} isn't allowed by this service (backends); "
                f"{', '.join(self._backends)} may be asked for",
            )
        return f"{backend.name} {backend.version}"

    def _begin(self, spec: GrammarSpec, vocabulary: Vocabulary) -> _Flight:
        """Queues a compile. Raises Exhausted."""
        try:
            return _Flight(spec, vocabulary, self._children.submit(spec, vocabulary))
        except ServiceError as error:
            metrics.COMPILES.labels(error.reason.lower()).inc()
            raise

    def _leave(self, grammar_id: str, waiter: "Future[Grammar]") -> None:
        """A caller is gone: it waits no more, and the last one takes the compile along."""
        with self._lock:
            flight = self._flights.get(grammar_id)
            if flight is None or waiter not in flight.waiting:
                return  # it has its answer
            flight.waiting.remove(waiter)
            abandoned = not flight.waiting
            if abandoned:
                del self._flights[grammar_id]  # an equal compile begins anew
        if abandoned:
            flight.artifact.cancel()
        waiter.cancel()

    def _land(self, grammar_id: str, flight: _Flight) -> None:
        """Takes in what a child made, on its thread, and tells all who wait."""
        outcome: Grammar | BaseException
        try:
            outcome = self._load(grammar_id, flight)
        except CancelledError:
            metrics.COMPILES.labels("cancelled").inc()
            return
        except BaseException as error:
            outcome = error
            reason = error.reason if isinstance(error, ServiceError) else "ERROR"
            metrics.COMPILES.labels(reason.lower()).inc()
        else:
            metrics.COMPILES.labels("compiled").inc()
            metrics.COMPILE_SECONDS.observe(outcome.compile_ms / 1000)
        # Freed at the end: a large one takes tens of milliseconds, and others need the lock.
        evicted: list[Grammar] = []
        with self._lock:
            if self._flights.get(grammar_id) is flight:
                del self._flights[grammar_id]
            waiting, flight.waiting = flight.waiting, set()
            if isinstance(outcome, Invalid):
                self._keep_refusal(grammar_id, outcome)
            elif isinstance(outcome, Grammar):
                outcome = self._keep(outcome)
                evicted = self._evict()
        for waiter in waiting:
            if not waiter.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, Grammar):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)
        evicted.clear()

    def _load(self, grammar_id: str, flight: _Flight) -> Grammar:
        """The grammar that a child's artifact is. Raises what refuses it, or CancelledError."""
        artifact, spec, vocabulary = flight.artifact.result(), flight.spec, flight.vocabulary
        if len(artifact.data) > _MAX_ARTIFACT_BYTES:
            raise Invalid(
                "SPEC_TOO_LARGE",
                f"compiled, the spec has {len(artifact.data)} bytes; at most {_MAX_ARTIFACT_BYTES}",
            )
        backend = self._backends[artifact.backend]
        form = dataclasses.replace(spec, source=artifact.source)
        compiled = backend.load(artifact.data, form, vocabulary)
        return Grammar(
            id=grammar_id,
            spec=spec,
            vocabulary=vocabulary,
            backend=backend,
            compiled=compiled,
            compiled_source=artifact.source,
            # The catalog keeps the texts as well.
            memory_bytes=backend.memory_bytes(compiled) + _text_bytes(spec) + _text_bytes(form),
            compile_ms=artifact.compile_ms,
            unenforced=artifact.unenforced,
            annotations=artifact.annotations,
        )

    def _keep(self, grammar: Grammar) -> Grammar:
        """Holds a grammar, or gives the one that is held by its id. Needs the lock."""
        held = self._grammars.get(grammar.id)
        if held is not None:  # of a compile that began when this one's callers had gone
            return held
        self._grammars[grammar.id] = grammar
        self._bytes += grammar.memory_bytes
        return grammar

    def _keep_refusal(self, grammar_id: str, error: Invalid) -> None:
        """Needs the lock."""
        if grammar_id in self._refusals:
            return
        # A copy: the one that was raised holds its frames, and so the spec.
        kept = Invalid(error.reason, error.message, error.unenforced)
        self._refusals[grammar_id] = kept
        self._refusal_bytes += _refusal_size(grammar_id, error)
        while self._refusal_bytes > _MAX_REFUSAL_BYTES:
            self._refusal_bytes -= _refusal_size(*self._refusals.popitem(last=False))

    def _evict(self) -> list[Grammar]:
        """Drops unpinned grammars until the limit holds; the newest stays. Needs the lock."""
        evicted = []
        newest = next(reversed(self._grammars))
        for grammar in list(self._grammars.values()):
            if self._bytes <= self._max_bytes:
                break
            if grammar.pins == 0 and grammar.id != newest:
                del self._grammars[grammar.id]
                self._bytes -= grammar.memory_bytes
                evicted.append(grammar)
                metrics.GRAMMAR_EVICTIONS.inc()
        metrics.GRAMMARS.set(len(self._grammars))
        metrics.GRAMMAR_BYTES.set(self._bytes)
        return evicted


def _text_bytes(spec: GrammarSpec) -> int:
    return sum(len(text.encode()) for text in (spec.source, *spec.choices))


def _refusal_size(grammar_id: str, error: Invalid) -> int:
    named = sum(len(item.pointer) + len(item.keyword) for item in error.unenforced)
    return 500 + len(grammar_id) + len(error.message) + named


def _unknown(grammar_id: str) -> NotFound:
    return NotFound(
        "UNKNOWN_GRAMMAR", f"grammar {grammar_id[:64]!r} isn't held here; compile its spec again"
    )
