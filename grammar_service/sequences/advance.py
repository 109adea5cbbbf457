"""Makes a sequence's history `history[:position] + tokens`, and its matcher follow.

Rewinds and accepts go to the backend in batches over the rows of a step: first all rewinds, then
the tokens column by column.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from grammar_service import metrics
from grammar_service.backends.base import Backend, Matcher
from grammar_service.sequences.rows import Outcome, Row
from grammar_service.sequences.sequence import NOT_TERMINATED, Rejection, Sequence


def vocabulary_limit(sequence: Sequence) -> int:
    """Token ids at or past this can't be produced."""
    vocabulary = sequence.grammar.vocabulary
    return min(vocabulary.width, len(vocabulary.tokens))


@dataclass(slots=True, eq=False)
class _Feed:
    """Tokens on their way into one matcher."""

    row: Row
    sequence: Sequence
    tokens: Seq[int]
    replayed: int
    """How many of the tokens the history has already: the matcher is rebuilt."""
    next: int = 0


class Advance:
    """Aligns rows. Callers hold the locks of their sequences."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def align(self, rows: Seq[Row]) -> None:
        """Brings the sequences of open rows to where the rows say they are.

        Settles rows whose position can't be reached or whose tokens are illegal.
        """
        fresh = [(row, self._keep(row)) for row in rows]
        self._rollback([row for row in rows if row.rewound])
        feeds = [self._feed(row, tokens) for row, tokens in fresh if row.open()]
        self._accept_columns([feed for feed in feeds if feed is not None])

    def rebuild(self, sequence: Sequence) -> Matcher:
        """A matcher that has taken what the sequence's has. Raises what the backend raises."""
        start = sequence.opening.constraint_start
        tokens = sequence.history[start : start + sequence.consumed()]
        return self._replayed(sequence, tokens)

    def _keep(self, row: Row) -> Seq[int]:
        """Cuts the history back to what the row shares with it; returns the row's other tokens."""
        sequence = row.sequence
        assert sequence is not None
        history = sequence.history
        held = len(history)
        position = row.position
        if position > held:
            row.history_length = held
            if sequence.rejection is not None:
                _, reason, message = sequence.rejection
                row.end(Outcome.REJECTED, reason, message)
            else:
                row.end(Outcome.HISTORY_GAP)
            return ()
        sequence.rejection = None
        if position == held:
            return row.tokens
        same = _shared(history[position : position + len(row.tokens)], row.tokens)
        keep = position + same
        row.rewound = held - keep
        row.accepted = same
        return row.tokens[same:]

    def _rollback(self, rows: Seq[Row]) -> None:
        """Cuts histories back, and matchers with them."""
        matchers, counts, sequences = [], [], []
        for row in rows:
            sequence = row.sequence
            assert sequence is not None
            before = sequence.consumed()
            del sequence.history[len(sequence.history) - row.rewound :]
            if sequence.terminated_at >= len(sequence.history):
                sequence.terminated_at = NOT_TERMINATED
            count = before - sequence.consumed()
            if sequence.matcher is not None and count:
                matchers.append(sequence.matcher)
                counts.append(count)
                sequences.append(sequence)
        if not matchers:
            return
        try:
            self._backend.rollback(matchers, counts)
        except Exception:
            # How far each got is unknown; all are rebuilt.
            metrics.BACKEND_ERRORS.labels("rollback").inc()
            for sequence in sequences:
                sequence.matcher = None

    def _feed(self, row: Row, tokens: Seq[int]) -> _Feed | None:
        """Records what needs no matcher; the rest is for the matcher, rebuilt where it is gone."""
        sequence = row.sequence
        assert sequence is not None
        history = sequence.history
        start = sequence.opening.constraint_start
        if sequence.terminated():
            history.extend(tokens)
            return None
        if len(history) < start:
            free = tokens[: start - len(history)]
            history.extend(free)
            row.accepted += len(free)
            tokens = tokens[len(free) :]
        if sequence.matcher is not None:
            return _Feed(row, sequence, tokens, 0) if tokens else None
        if len(history) + len(row.drafts) < start:
            return None
        try:
            sequence.matcher = self._new(sequence)
        except Exception as error:
            self._fail(row, "matcher", error)
            return None
        replay = history[start:]
        if not replay:
            return _Feed(row, sequence, tokens, 0) if tokens else None
        metrics.REBUILDS.inc()
        metrics.REPLAYED_TOKENS.inc(len(replay))
        return _Feed(row, sequence, replay + array("i", tokens), len(replay))

    def _accept_columns(self, feeds: list[_Feed]) -> None:
        """Feeds the matchers a column of tokens at a time."""
        while feeds:
            column = [feed for feed in feeds if self._producible(feed)]
            tokens = [feed.tokens[feed.next] for feed in column]
            taken = self._accept(column, tokens) if column else []
            metrics.TOKENS.inc(sum(taken))
            for feed, token, accepted in zip(column, tokens, taken, strict=True):
                if accepted:
                    self._take(feed, token)
                elif feed.row.open():
                    self._reject(feed, "TOKEN_ILLEGAL", f"the grammar doesn't allow token {token}")
            feeds = [f for f in column if f.row.open() and f.next < len(f.tokens)]

    def _producible(self, feed: _Feed) -> bool:
        token = feed.tokens[feed.next]
        limit = vocabulary_limit(feed.sequence)
        if 0 <= token < limit:
            return True
        message = f"token {token} is outside the vocabulary of {limit} tokens"
        self._reject(feed, "TOKEN_OUT_OF_RANGE", message)
        return False

    def _take(self, feed: _Feed, token: int) -> None:
        """Records a token that the matcher took."""
        feed.next += 1
        if feed.next <= feed.replayed:
            return
        sequence = feed.sequence
        sequence.history.append(token)
        feed.row.accepted += 1
        if token in sequence.stop_tokens and self._backend.terminated(sequence.matcher):
            sequence.terminated_at = len(sequence.history) - 1
            sequence.history.extend(feed.tokens[feed.next :])
            feed.next = len(feed.tokens)

    def _reject(self, feed: _Feed, reason: str, message: str) -> None:
        row, sequence = feed.row, feed.sequence
        if feed.next < feed.replayed:
            error = RuntimeError(f"a replay refused token {feed.tokens[feed.next]}")
            self._fail(row, "replay", error)
            return
        sequence.rejection = Rejection(feed.tokens[feed.next], reason, message)
        row.history_length = len(sequence.history)
        row.end(Outcome.REJECTED, reason, message)

    def _accept(self, feeds: Seq[_Feed], tokens: Seq[int]) -> list[bool]:
        try:
            return self._backend.accept([feed.sequence.matcher for feed in feeds], tokens)
        except Exception:
            # Which matchers took their token is unknown: each is rebuilt and goes on alone.
            metrics.BACKEND_ERRORS.labels("accept").inc()
            return [self._accept_alone(f, t) for f, t in zip(feeds, tokens, strict=True)]

    def _accept_alone(self, feed: _Feed, token: int) -> bool:
        sequence = feed.sequence
        try:
            if feed.next < feed.replayed:
                sequence.matcher = self._replayed(sequence, feed.tokens[: feed.next])
            else:
                sequence.matcher = self.rebuild(sequence)
            return self._backend.accept([sequence.matcher], [token])[0]
        except Exception as error:
            self._fail(feed.row, "accept", error)
            return False

    def _replayed(self, sequence: Sequence, tokens: Seq[int]) -> Matcher:
        matcher = self._new(sequence)
        for token in tokens:
            if not self._backend.accept([matcher], [token])[0]:
                raise RuntimeError(f"a replay refused token {token}")
        return matcher

    def _new(self, sequence: Sequence) -> Matcher:
        return self._backend.matcher(sequence.grammar.compiled, sequence.stop_tokens)

    @staticmethod
    def _fail(row: Row, call: str, error: Exception) -> None:
        """The backend can't go on with this row; its neighbours can."""
        metrics.BACKEND_ERRORS.labels(call).inc()
        assert row.sequence is not None
        row.sequence.matcher = None
        row.end(Outcome.FAILED, "BACKEND_ERROR", f"{call}: {error}")


def _shared(held: "array[int]", tokens: Seq[int]) -> int:
    """How many tokens at the start are the same."""
    if held.tolist() == list(tokens[: len(held)]):
        return len(held)
    return next(i for i, pair in enumerate(zip(held, tokens, strict=False)) if pair[0] != pair[1])
