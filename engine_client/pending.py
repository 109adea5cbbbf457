"""A step on its way: what was asked, what is known of the answer, and what went unanswered."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_client.regions import Region
from engine_client.stream import Reply, StepStream
from engine_client.types import Note, Outcome, Row

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False, weakref_slot=True)
class PendingStep:
    """A step that was submitted; give it to `collect` once."""

    rows: Sequence[Row]
    mask_rows: list[int]
    total: int
    """Mask rows of all rows."""
    words: int
    part: int
    """Which part of the region it has."""
    stream: StepStream | None = None
    reply: Reply | None = None
    region: Region | None = None
    masks: "torch.Tensor | None" = None
    outcomes: list[Outcome | None] = field(default_factory=list)
    legal_drafts: list[int] = field(default_factory=list)
    notes: dict[int, Note] = field(default_factory=dict)
    collected: bool = False

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Starts over: repeating a whole step is harmless, and simpler than keeping half of it."""
        self.masks = None
        self.outcomes = [None] * len(self.rows)
        self.legal_drafts = [0] * len(self.rows)
        self.notes = {}

    def fail(self, index: int, reason: str, message: str) -> None:
        """Settles a row as failed; its mask is filled in at the end."""
        self.outcomes[index] = Outcome.FAILED
        self.legal_drafts[index] = 0
        self.notes[index] = Note(reason, message)

    def writable(self) -> "torch.Tensor":
        """The masks, made if there are none yet."""
        import torch

        if self.masks is None:
            self.masks = torch.zeros((self.total, self.words), dtype=torch.int32)
        return self.masks

    def unsettled(self) -> list[int]:
        """Indices of the rows without an outcome."""
        return [index for index, outcome in enumerate(self.outcomes) if outcome is None]


class Unanswered:
    """Sequences whose last step the service may never have seen, of all threads.

    A row's position counts on the step before it. Where that one went unanswered, the service may
    hold other tokens, so the whole history is sent.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._lock = threading.Lock()

    def add(self, step: PendingStep) -> None:
        """Remembers the rows of a step that have no outcome."""
        with self._lock:
            self._ids.update(step.rows[index].sequence_id for index in step.unsettled())

    def discard(self, sequence_ids: Iterable[str]) -> None:
        """Forgets sequences that were answered, or closed."""
        if self._ids:
            with self._lock:
                self._ids.difference_update(sequence_ids)

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._ids
