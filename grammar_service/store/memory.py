"""The store in this process's memory: sequences by id, least recently used first.

It knows of a sequence only what `Held` says, so that it stands below everything else.
"""

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from grammar_service import metrics


class Held(Protocol):
    """What the store has to know of a sequence."""

    id: str
    opening: Any
    closed: bool
    last_used: float


S = TypeVar("S", bound=Held)


class MemoryStore(Generic[S]):
    """Holds up to `limit` sequences; what was idle for longest goes first. Thread-safe.

    `make` makes a sequence from its id, its opening and a serial; it may raise a ServiceError.
    `ended` is told of sequences that went away.
    """

    def __init__(
        self,
        limit: int,
        idle_seconds: float,
        make: Callable[[str, Any, int], S],
        ended: Callable[[list[S]], None],
    ) -> None:
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._make = make
        self._ended = ended
        self._sequences: OrderedDict[str, S] = OrderedDict()
        self._serials = itertools.count()
        self._lock = threading.Lock()

    def get(self, sequence_id: str) -> S | None:
        """The sequence, now most recently used; None if it isn't held."""
        with self._lock:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._touch(sequence)
            return sequence

    def peek(self, sequence_id: str) -> S | None:
        """The sequence, without counting as a use."""
        with self._lock:
            return self._sequences.get(sequence_id)

    def open(self, sequence_id: str, opening: Any) -> S:
        """The sequence, opened like this: the one held, or a new one in its place.

        Raises what makes it: NotFound with UNKNOWN_GRAMMAR, Invalid for its stop tokens.
        """
        with self._lock:
            held = self._sequences.get(sequence_id)
            if held is not None and held.opening == opening:
                self._touch(held)
                return held
        fresh = self._make(sequence_id, opening, next(self._serials))
        with self._lock:
            held = self._sequences.get(sequence_id)
            # Two ranks may open at the same moment: the first one stays.
            if held is not None and held.opening == opening:
                self._touch(held)
                fresh.closed = True
                ended, result = [fresh], held
            else:
                metrics.SEQUENCES_OPENED.labels("replaced" if held else "opened").inc()
                ended = self._put(fresh)
                result = fresh
        self._ended(ended)
        return result

    def put(self, sequences: Iterable[S]) -> None:
        """Takes in copies, each in place of what had its id."""
        ended: list[S] = []
        with self._lock:
            for sequence in sequences:
                metrics.SEQUENCES_OPENED.labels("forked").inc()
                ended += self._put(sequence)
        self._ended(ended)

    def make(self, sequence_id: str, opening: Any) -> S:
        """A sequence that isn't held yet; give it to `put`."""
        return self._make(sequence_id, opening, next(self._serials))

    def close(self, sequence_ids: Iterable[str]) -> int:
        """Drops sequences; returns how many there were."""
        with self._lock:
            ended = [self._drop(i, "closed") for i in sequence_ids if i in self._sequences]
        self._ended(ended)
        return len(ended)

    def expire(self) -> None:
        """Drops the sequences that were idle for too long."""
        before = time.monotonic() - self._idle_seconds
        ended = []
        with self._lock:
            while self._sequences:
                oldest = next(iter(self._sequences.values()))
                if oldest.last_used > before:
                    break
                ended.append(self._drop(oldest.id, "expired"))
        self._ended(ended)

    def idle(self, sequence: S) -> float:
        """Seconds since the sequence was last used."""
        return time.monotonic() - sequence.last_used

    def _touch(self, sequence: S) -> None:
        sequence.last_used = time.monotonic()
        self._sequences.move_to_end(sequence.id)

    def _put(self, sequence: S) -> list[S]:
        """Needs the lock; returns what had to go."""
        ended = []
        if sequence.id in self._sequences:
            ended.append(self._drop(sequence.id, "replaced"))
        elif len(self._sequences) >= self._limit:
            ended.append(self._drop(next(iter(self._sequences)), "evicted"))
        self._sequences[sequence.id] = sequence
        self._touch(sequence)
        metrics.SEQUENCES.set(len(self._sequences))
        return ended

    def _drop(self, sequence_id: str, why: str) -> S:
        sequence = self._sequences.pop(sequence_id)
        sequence.closed = True
        metrics.SEQUENCES_ENDED.labels(why).inc()
        metrics.SEQUENCES.set(len(self._sequences))
        return sequence
