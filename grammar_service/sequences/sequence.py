"""A sequence: how it was opened, its history, and where that leaves it.

Everything but the opening and the history is a cache of what those two determine:

                 tokens                      stop token
   ┌─> running ──────────> running ────────────────────────> terminated
   │      │                                                       │
   │      └── illegal token ──> rejected (tokens before it kept)  │
   └───────────────────────────── rewind ─────────────────────────┘
"""

import threading
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from grammar_service.backends.base import Matcher
from grammar_service.grammars.catalog import Grammar
from grammar_service.masks.layout import Row

NOT_TERMINATED = 1 << 62


@dataclass(frozen=True, slots=True)
class Opening:
    """How a sequence is opened; with the history it determines the state."""

    grammar_id: str
    stop_token_ids: tuple[int, ...] = ()
    constraint_start: int = 0


class Rejection(NamedTuple):
    """The token that was refused after the history."""

    token: int
    reason: str
    message: str


class Sequence:
    """One sequence. All but `id` and `opening` is guarded by `lock`.

    Locks of several sequences are taken in the order of `serial`.
    """

    __slots__ = (
        "closed", "grammar", "history", "id", "last_used", "lock", "matcher", "opening",
        "rejection", "serial", "stop_row", "stop_tokens", "terminated_at",
    )  # fmt: skip

    def __init__(
        self,
        sequence_id: str,
        opening: Opening,
        serial: int,
        grammar: Grammar,
        stop_tokens: tuple[int, ...],
        stop_row: Row,
    ) -> None:
        self.id = sequence_id
        self.opening = opening
        self.serial = serial
        self.grammar = grammar
        self.stop_tokens = stop_tokens
        """The tokenizer's and the opening's, ascending; never empty."""
        self.stop_row = stop_row
        self.lock = threading.Lock()
        self.history = array("i")
        self.terminated_at = NOT_TERMINATED
        """Index in the history of the stop token that ended it."""
        self.rejection: Rejection | None = None
        self.matcher: Matcher | None = None
        """Has taken `consumed()` tokens; None is rebuilt by replay."""
        self.last_used = 0.0
        """time.monotonic() of the last step; guarded by the store's lock."""
        self.closed = False

    def consumed(self) -> int:
        """How many tokens of the history the matcher takes: constrained, and not past the end."""
        end = min(len(self.history), self.terminated_at + 1)
        return max(0, end - self.opening.constraint_start)

    def terminated(self) -> bool:
        """Whether the history has a stop token that ended it."""
        return self.terminated_at != NOT_TERMINATED
