"""A row of a step: what the caller says of one sequence, and what comes of it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum

from grammar_service.masks.layout import Row as MaskRow
from grammar_service.sequences.sequence import Opening, Sequence


class Outcome(IntEnum):
    """How a row ended; the numbers are the contract's."""

    UNSPECIFIED = 0
    OK = 1
    COMPLETE = 2
    TERMINATED = 3
    REJECTED = 4
    HISTORY_GAP = 5
    UNKNOWN_SEQUENCE = 6
    UNKNOWN_GRAMMAR = 7
    FAILED = 8


@dataclass(slots=True, eq=False)
class Row:
    """One entry of a step. The fields from `sequence` on are filled by the step."""

    sequence_id: str | None
    """None: the row number is bound to no sequence."""
    position: int
    tokens: Seq[int]
    drafts: Seq[int]
    mask_row: int
    """First of its 1 + len(drafts) mask rows."""
    opening: Opening | None = None
    """How the caller has it opened; None: as it is."""
    may_open: bool = False
    """Whether the opening came with this step, so that the sequence may be opened with it."""

    sequence: Sequence | None = None
    stop_row: MaskRow | None = None
    """The mask of a row that fails before it has a sequence, where that is known."""
    outcome: Outcome = Outcome.UNSPECIFIED
    legal_drafts: int = 0
    rewound: int = 0
    accepted: int = 0
    ignored: int = 0
    history_length: int = 0
    reason: str = ""
    message: str = ""

    def end(self, outcome: Outcome, reason: str = "", message: str = "") -> None:
        """Settles the row; later phases leave it alone."""
        self.outcome = outcome
        self.reason = reason
        self.message = message

    def open(self) -> bool:
        """Whether nothing has settled the row yet."""
        return self.outcome is Outcome.UNSPECIFIED
