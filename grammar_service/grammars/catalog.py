"""The compiled grammars of this replica: one compile for equal specs, and a bounded cache.

A live sequence pins its grammar: eviction takes the least recently used one without sequences.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine_client.spec import GrammarSpec
from engine_client.vocabulary import Vocabulary
from grammar_service import metrics
from grammar_service.backends import Backend
from grammar_service.backends.base import Compiled
from grammar_service.errors import Invalid, NotFound, ServiceError, Unenforced
from grammar_service.grammars.children import CompileChildren
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


class Catalog:
    """Compiles specs and holds what came of them. Thread-safe."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        children: CompileChildren,
        max_bytes: int,
    ) -> None:
        self._backends = backends
        self._versions = ",".join(f"{name} {b.version}" for name, b in sorted(backends.items()))
        self._children = children
        self._max_bytes = max_bytes
        self._bytes = 0
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._running: dict[str, Future[Grammar]] = {}
        self._refusals: OrderedDict[str, Invalid] = OrderedDict()
        """What a spec itself is the reason of; never a deadline, a kill or a crash."""
        self._refusal_bytes = 0
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> tuple[Grammar, bool]:
        """The grammar of a canonical spec, and whether it was held before. Waits for a compile.

        Raises a ServiceError: Invalid, DeadlineExceeded, Exhausted or Internal.
        """
        grammar_id = grammar_id_of(spec, vocabulary.id, self._versions)
        with self._lock:
            held = self._grammars.get(grammar_id)
            if held is not None:
                self._grammars.move_to_end(grammar_id)
            refusal = self._refusals.get(grammar_id)
            running = self._running.get(grammar_id)
            ours = held is None and refusal is None and running is None
            if ours:
                running = self._running[grammar_id] = Future()
        if held is not None:
            metrics.COMPILES.labels("cached").inc()
            return held, True
        if refusal is not None:
            metrics.COMPILES.labels("refusal_cached").inc()
            raise Invalid(refusal.reason, refusal.message, refusal.unenforced)
        assert running is not None
        if ours:
            self._compile(running, grammar_id, spec, vocabulary)
        return running.result(), not ours

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

    def _compile(
        self, running: "Future[Grammar]", grammar_id: str, spec: GrammarSpec, vocabulary: Vocabulary
    ) -> None:
        """Runs the one compile of equal specs; its outcome goes to the future."""
        try:
            grammar = self._make(grammar_id, spec, vocabulary)
        except BaseException as error:
            reason = error.reason if isinstance(error, ServiceError) else "ERROR"
            metrics.COMPILES.labels(reason.lower()).inc()
            with self._lock:
                del self._running[grammar_id]
                if isinstance(error, Invalid):
                    self._keep_refusal(grammar_id, error)
            running.set_exception(error)
            return
        metrics.COMPILES.labels("compiled").inc()
        metrics.COMPILE_SECONDS.observe(grammar.compile_ms / 1000)
        with self._lock:
            del self._running[grammar_id]
            self._grammars[grammar_id] = grammar
            self._bytes += grammar.memory_bytes
            self._evict()
        running.set_result(grammar)

    def _make(self, grammar_id: str, spec: GrammarSpec, vocabulary: Vocabulary) -> Grammar:
        """Has a child compile a spec. Raises what refuses it."""
        artifact = self._children.submit(spec, vocabulary).result()
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

    def _keep_refusal(self, grammar_id: str, error: Invalid) -> None:
        """Needs the lock."""
        # A copy: the one that was raised holds its frames, and so the spec.
        kept = Invalid(error.reason, error.message, error.unenforced)
        self._refusals[grammar_id] = kept
        self._refusal_bytes += _refusal_size(grammar_id, error)
        while self._refusal_bytes > _MAX_REFUSAL_BYTES:
            self._refusal_bytes -= _refusal_size(*self._refusals.popitem(last=False))

    def _evict(self) -> None:
        """Drops unpinned grammars until the limit holds; the newest stays. Needs the lock."""
        newest = next(reversed(self._grammars))
        for grammar in list(self._grammars.values()):
            if self._bytes <= self._max_bytes:
                break
            if grammar.pins == 0 and grammar.id != newest:
                del self._grammars[grammar.id]
                self._bytes -= grammar.memory_bytes
                metrics.GRAMMAR_EVICTIONS.inc()
        metrics.GRAMMARS.set(len(self._grammars))
        metrics.GRAMMAR_BYTES.set(self._bytes)


def _text_bytes(spec: GrammarSpec) -> int:
    return sum(len(text.encode()) for text in (spec.source, *spec.choices))


def _refusal_size(grammar_id: str, error: Invalid) -> int:
    named = sum(len(item.pointer) + len(item.keyword) for item in error.unenforced)
    return 500 + len(grammar_id) + len(error.message) + named


def _unknown(grammar_id: str) -> NotFound:
    return NotFound(
        "UNKNOWN_GRAMMAR", f"grammar {grammar_id[:64]!r} isn't held here; compile its spec again"
    )
