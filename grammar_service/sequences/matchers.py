"""The cache of matchers, bounded in estimated bytes. What it evicts is rebuilt by replay."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

from grammar_service import metrics
from grammar_service.sequences.sequence import Sequence


class MatcherCache:
    """Knows which sequences have a matcher, and takes them away from those least recently used."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sizes: OrderedDict[Sequence, int] = OrderedDict()
        self._lock = threading.Lock()

    def used(self, sequences: Iterable[Sequence]) -> None:
        """Counts the matchers of sequences that a step used, whose locks are held; evicts others.

        A sequence whose matcher is None is forgotten. The limit gives way to the matchers that
        steps are using this moment.
        """
        with self._lock:
            for sequence in sequences:
                self._bytes -= self._sizes.pop(sequence, 0)
                if sequence.matcher is not None and not sequence.closed:
                    size = sequence.grammar.backend.matcher_bytes(sequence.consumed())
                    self._sizes[sequence] = size
                    self._bytes += size
            if self._bytes > self._max_bytes:
                self._evict()
            metrics.MATCHER_BYTES.set(self._bytes)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drops sequences that went away. Their locks aren't needed: they are closed."""
        with self._lock:
            for sequence in sequences:
                self._bytes -= self._sizes.pop(sequence, 0)
            metrics.MATCHER_BYTES.set(self._bytes)

    def _evict(self) -> None:
        for sequence in list(self._sizes):
            if self._bytes <= self._max_bytes:
                return
            if not sequence.lock.acquire(blocking=False):
                continue  # in a step
            sequence.matcher = None
            sequence.lock.release()
            self._bytes -= self._sizes.pop(sequence)
            metrics.MATCHER_EVICTIONS.inc()
