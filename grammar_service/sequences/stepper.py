"""What can be done with sequences: step, fork, close, show. Finds them, locks them, delegates."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from grammar_service import metrics
from grammar_service.backends.base import Matcher
from grammar_service.errors import Invalid, NotFound, ServiceError
from grammar_service.grammars.catalog import Catalog
from grammar_service.masks.layout import Row as MaskRow
from grammar_service.masks.layout import row_of, words_for
from grammar_service.sequences.advance import Advance
from grammar_service.sequences.masker import Masker
from grammar_service.sequences.matchers import MatcherCache
from grammar_service.sequences.rows import Outcome, Row
from grammar_service.sequences.sequence import NOT_TERMINATED, Opening, Sequence
from grammar_service.store.memory import MemoryStore

_MAX_STOP_TOKENS = 1024
_MAX_ID = 256


class Fork(NamedTuple):
    """One copy; without a position, of the whole history."""

    source_id: str
    target_id: str
    position: int | None


class State(NamedTuple):
    """A sequence as it stands."""

    opening: Opening
    tokens: list[int]
    outcome: Outcome
    message: str
    idle_seconds: float


class _Engine(NamedTuple):
    """What steps the sequences of one backend."""

    advance: Advance
    masker: Masker


class Stepper:
    """The sequences of this replica. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        max_sequences: int,
        idle_seconds: float,
        matcher_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._engines: dict[str, _Engine] = {}
        self._matchers = MatcherCache(matcher_bytes)
        self._store: MemoryStore[Sequence] = MemoryStore(
            max_sequences, idle_seconds, self._make, self._ended
        )

    def step(self, rows: Seq[Row], masks_for: Callable[[int], torch.Tensor]) -> None:
        """Steps the rows and fills their masks.

        `masks_for(words)` gives the int32[n, words] that the rows' mask rows lie in. It isn't
        called when no row has a mask; what it raises ends the step before it touches a sequence.
        """
        sequences = self._resolve(rows)
        if not sequences:
            _count(rows)
            return
        width = sequences[0].grammar.vocabulary.width
        masks = masks_for(words_for(width))
        with _locked(sequences):
            for row in rows:
                if row.sequence is not None and row.sequence.closed:
                    row.end(Outcome.UNKNOWN_SEQUENCE)
            try:
                for engine, group in self._by_backend(rows):
                    engine.advance.align([row for row in group if row.open()])
                    engine.masker.fill(group, masks, width)
            except BaseException:
                # Histories are right at any moment; matchers may have run ahead of them.
                for sequence in sequences:
                    sequence.matcher = None
                raise
            finally:
                self._matchers.used(sequences)
        _count(rows)

    def fork(self, forks: Seq[Fork]) -> list[Outcome]:
        """Copies sequences; all sources are read before any target is written."""
        outcomes, copies = [], []
        for fork in forks:
            outcome, copy = self._copy(fork)
            outcomes.append(outcome)
            if copy is not None:
                copies.append(copy)
        self._store.put(copies)
        self._matchers.used(copies)
        return outcomes

    def close(self, sequence_ids: Seq[str]) -> int:
        """Drops sequences; returns how many there were."""
        return self._store.close(sequence_ids)

    def expire(self) -> None:
        """Drops the sequences that were idle for too long; called now and then."""
        self._store.expire()

    def show(self, sequence_id: str) -> State:
        """A sequence as it stands; changes nothing. Raises NotFound with UNKNOWN_SEQUENCE."""
        sequence = self._store.peek(sequence_id)
        if sequence is None:
            raise NotFound("UNKNOWN_SEQUENCE", f"sequence {sequence_id[:64]!r} isn't held here")
        with sequence.lock:
            outcome, message = self._outcome(sequence)
            return State(
                sequence.opening,
                sequence.history.tolist(),
                outcome,
                message,
                self._store.idle(sequence),
            )

    def _by_backend(self, rows: Seq[Row]) -> Iterable[tuple["_Engine", Seq[Row]]]:
        """The rows by the backend of their grammars; those without a sequence go with the first."""
        groups: dict[str, list[Row]] = {}
        homeless = []
        for row in rows:
            if row.sequence is None:
                homeless.append(row)
            else:
                groups.setdefault(row.sequence.grammar.backend.name, []).append(row)
        for group in groups.values():
            group += homeless
            homeless = []
            assert group[0].sequence is not None
            yield self._engine(group[0].sequence), group

    def _engine(self, sequence: Sequence) -> "_Engine":
        backend = sequence.grammar.backend
        engine = self._engines.get(backend.name)
        if engine is None:
            engine = self._engines[backend.name] = _Engine(Advance(backend), Masker(backend))
        return engine

    def _outcome(self, sequence: Sequence) -> tuple[Outcome, str]:
        if sequence.rejection is not None:
            return Outcome.REJECTED, sequence.rejection.message
        if sequence.terminated():
            return Outcome.TERMINATED, ""
        if len(sequence.history) < sequence.opening.constraint_start:
            return Outcome.OK, ""
        try:
            matcher = sequence.matcher or self._engine(sequence).advance.rebuild(sequence)
            completed = sequence.grammar.backend.completed([matcher])[0]
        except Exception as error:
            return Outcome.FAILED, str(error)
        return (Outcome.COMPLETE if completed else Outcome.OK), ""

    def _resolve(self, rows: Seq[Row]) -> list[Sequence]:
        """Finds or opens the sequences of the rows; returns them in the order of their locks."""
        sequences: dict[str, Sequence] = {}
        width = None
        for row in rows:
            sequence = self._find(row, sequences)
            if sequence is None:
                continue
            if width is None:
                width = sequence.grammar.vocabulary.width
            if sequence.grammar.vocabulary.width != width:
                row.end(Outcome.FAILED, "WIDTH_MISMATCH", "a step's rows share one mask width")
                continue
            row.sequence = sequences[sequence.id] = sequence
        return sorted(sequences.values(), key=lambda sequence: sequence.serial)

    def _find(self, row: Row, seen: dict[str, Sequence]) -> Sequence | None:
        """The row's sequence, or None and the row is settled."""
        sequence_id = row.sequence_id
        if sequence_id is None:
            row.end(Outcome.UNKNOWN_SEQUENCE, "ROW_UNBOUND", "no sequence is bound to this row")
            return None
        if sequence_id in seen:
            row.stop_row = seen[sequence_id].stop_row
            row.end(Outcome.FAILED, "DUPLICATE_SEQUENCE", "the step has this sequence already")
            return None
        try:
            if row.opening is not None and row.may_open:
                return self._store.open(sequence_id, row.opening)
        except NotFound as error:
            row.end(Outcome.UNKNOWN_GRAMMAR, error.reason, error.message)
            return None
        except ServiceError as error:
            row.end(Outcome.FAILED, error.reason, error.message)
            return None
        sequence = self._store.get(sequence_id)
        # Another caller may have opened the id otherwise: then this one's sequence isn't here.
        if sequence is None or row.opening not in (None, sequence.opening):
            row.end(Outcome.UNKNOWN_SEQUENCE)
            return None
        return sequence

    def _make(self, sequence_id: str, opening: Opening, serial: int) -> Sequence:
        if not 0 < len(sequence_id) <= _MAX_ID:
            raise Invalid("SEQUENCE_ID_INVALID", f"a sequence id has 1 to {_MAX_ID} characters")
        grammar = self._catalog.pin(opening.grammar_id)
        try:
            vocabulary = grammar.vocabulary
            limit = min(vocabulary.width, len(vocabulary.tokens))
            stop_tokens = _stop_tokens(opening, vocabulary.stop_token_ids, limit)
        except ServiceError:
            self._catalog.unpin(grammar)
            raise
        stop_row = _stop_row(stop_tokens, vocabulary.width)
        return Sequence(sequence_id, opening, serial, grammar, stop_tokens, stop_row)

    def _ended(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._catalog.unpin(sequence.grammar)
        self._matchers.forget(sequences)

    def _copy(self, fork: Fork) -> tuple[Outcome, Sequence | None]:
        source = self._store.get(fork.source_id)
        if source is None:
            return Outcome.UNKNOWN_SEQUENCE, None
        with source.lock:
            held = len(source.history)
            position = held if fork.position is None else fork.position
            if position > held:
                return Outcome.HISTORY_GAP, None
            try:
                copy = self._store.make(fork.target_id, source.opening)
            except ServiceError:
                return Outcome.FAILED, None
            copy.history = source.history[:position]
            if source.terminated_at < position:
                copy.terminated_at = source.terminated_at
            else:
                copy.terminated_at = NOT_TERMINATED
            if position == held:
                copy.rejection = source.rejection
                copy.matcher = self._forked(source)
            return Outcome.OK, copy

    def _forked(self, source: Sequence) -> Matcher | None:
        """A copy of the source's matcher; None is rebuilt by the first step."""
        if source.matcher is None:
            return None
        try:
            return source.grammar.backend.fork(source.matcher)
        except Exception:
            metrics.BACKEND_ERRORS.labels("fork").inc()
            return None


@contextmanager
def _locked(sequences: Seq[Sequence]) -> Iterator[None]:
    """Holds the locks of sequences that are in the order of their serials."""
    taken = 0
    try:
        for sequence in sequences:
            sequence.lock.acquire()
            taken += 1
        yield
    finally:
        for sequence in sequences[:taken]:
            sequence.lock.release()


def _stop_tokens(opening: Opening, own: tuple[int, ...], limit: int) -> tuple[int, ...]:
    if len(opening.stop_token_ids) > _MAX_STOP_TOKENS:
        raise Invalid("STOP_TOKENS_INVALID", f"at most {_MAX_STOP_TOKENS} stop tokens")
    stop_tokens = tuple(sorted({*own, *opening.stop_token_ids}))
    if not stop_tokens:
        raise Invalid(
            "STOP_TOKENS_INVALID",
            "neither the tokenizer nor the opening has a stop token; give stop_token_ids",
        )
    if stop_tokens[-1] >= limit:
        raise Invalid(
            "STOP_TOKENS_INVALID",
            f"stop token {stop_tokens[-1]} can't be produced: ids are below {limit}",
        )
    return stop_tokens


@lru_cache(maxsize=256)
def _stop_row(stop_tokens: tuple[int, ...], width: int) -> MaskRow:
    return row_of(stop_tokens, width)


def _count(rows: Seq[Row]) -> None:
    outcomes: dict[Outcome, int] = {}
    drafts = legal = rewinds = rewound = 0
    for row in rows:
        outcomes[row.outcome] = outcomes.get(row.outcome, 0) + 1
        drafts += len(row.drafts)
        legal += row.legal_drafts
        if row.rewound:
            rewinds += 1
            rewound += row.rewound
    for outcome, count in outcomes.items():
        metrics.ROWS.labels(outcome.name.lower()).inc(count)
    metrics.DRAFTS.labels("yes").inc(legal)
    metrics.DRAFTS.labels("no").inc(drafts - legal)
    metrics.REWINDS.inc(rewinds)
    metrics.REWOUND_TOKENS.inc(rewound)
