"""What the client counts: every retry, healing and fallback."""

import threading
from collections import Counter
from collections.abc import Mapping


class Stats:
    """Counters by name. Thread-safe.

    Of rows: rows, rewound, healed_history_gap, healed_unknown_sequence, healed_unknown_grammar,
    policy_fail, policy_in_process, policy_unconstrained. Of steps: steps, timeouts, resubmits (the
    stream broke), skipped (not even sent, while the service is known to be gone), nonsense (answers
    that don't fit), errors. Others: connects, regions_made, regions_abandoned, regions_given_up
    (masks come inline though shared memory was wanted), fallbacks_missing (grammars that can't be
    matched in process), dropped_calls (forks and closes that never arrived).
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Counts something."""
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> Mapping[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(self._counts)
