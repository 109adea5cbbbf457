"""Fills the masks of a step: one a row for the next token, and one after each legal draft.

Drafts are accepted column by column, each column filled in one batch, and taken back at the end.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from grammar_service import metrics
from grammar_service.backends.base import Backend
from grammar_service.masks.layout import Row as MaskRow
from grammar_service.masks.layout import row_of, tail_word
from grammar_service.sequences.advance import vocabulary_limit
from grammar_service.sequences.rows import Outcome, Row
from grammar_service.sequences.sequence import Sequence

_WITHOUT_MASK = {Outcome.HISTORY_GAP, Outcome.UNKNOWN_SEQUENCE, Outcome.UNKNOWN_GRAMMAR}


@dataclass(slots=True, eq=False)
class _Chain:
    """A row whose masks come from its grammar, and how far its drafts went."""

    row: Row
    sequence: Sequence
    taken: int = 0
    """Drafts that the matcher took; they are taken back."""
    ended: bool = False
    """The last legal draft was a stop token."""
    dead: bool = False
    """A fill failed, or nothing of the vocabulary goes on."""

    def mask_row(self) -> int:
        """The mask row after its legal drafts."""
        return self.row.mask_row + self.row.legal_drafts

    def free(self) -> bool:
        """Whether the token after the legal drafts is before the constraint's start."""
        position = len(self.sequence.history) + self.row.legal_drafts
        return position < self.sequence.opening.constraint_start


class Masker:
    """Fills masks. Callers hold the locks of the sequences, which are aligned."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def fill(self, rows: Seq[Row], masks: torch.Tensor, width: int) -> None:
        """Fills int32[n, words] for all rows and settles those that are open."""
        out: MaskRow = masks.numpy()
        chains = [chain for row in rows if (chain := _begin(row, out)) is not None]
        self._fill(chains, masks, out, width)
        self._complete(chains)
        going = [chain for chain in chains if chain.row.drafts]
        while going:
            going = self._accept_column(going, out)
            self._fill([chain for chain in going if not chain.ended], masks, out, width)
            going = [c for c in going if not c.dead and c.row.legal_drafts < len(c.row.drafts)]
        self._take_back([chain for chain in chains if chain.taken])
        for chain in chains:
            row = chain.row
            out[chain.mask_row() + 1 : row.mask_row + 1 + len(row.drafts)] = out[chain.mask_row()]

    def _fill(self, chains: Seq[_Chain], masks: torch.Tensor, out: MaskRow, width: int) -> None:
        """Fills the mask row that each chain stands at."""
        filling = []
        for chain in chains:
            if chain.free():
                out[chain.mask_row()] = _free_row(vocabulary_limit(chain.sequence), width)
            else:
                filling.append(chain)
        if not filling:
            return
        indices = [chain.mask_row() for chain in filling]
        try:
            self._backend.fill([chain.sequence.matcher for chain in filling], masks, indices)
        except Exception:
            metrics.BACKEND_ERRORS.labels("fill").inc()
            for chain in filling:
                self._fill_alone(chain, masks)
        # Backends leave the bits past the width as the buffer had them.
        out[indices, -1] &= tail_word(width)
        nonzero = np.any(out[_span(indices)], axis=1).tolist()
        if not all(nonzero):
            for chain, some in zip(filling, nonzero, strict=True):
                if not some and not chain.dead:
                    _bury(chain, "DEAD_END", "no token of this vocabulary continues the grammar")
        for chain in filling:
            if chain.dead:
                out[chain.mask_row()] = chain.sequence.stop_row

    def _fill_alone(self, chain: _Chain, masks: torch.Tensor) -> None:
        try:
            self._backend.fill([chain.sequence.matcher], masks, [chain.mask_row()])
        except Exception as error:
            _bury(chain, "BACKEND_ERROR", f"fill: {error}")
            chain.sequence.matcher = None
            chain.taken = 0

    def _complete(self, chains: Seq[_Chain]) -> None:
        """Settles the rows that nothing has settled: OK or COMPLETE."""
        free = [chain for chain in chains if chain.row.open() and chain.free()]
        for chain in free:
            chain.row.outcome = Outcome.OK
        bound = [chain for chain in chains if chain.row.open()]
        may_end = self._backend.completed([chain.sequence.matcher for chain in bound])
        for chain, completed in zip(bound, may_end, strict=True):
            chain.row.outcome = Outcome.COMPLETE if completed else Outcome.OK

    def _accept_column(self, chains: Seq[_Chain], out: MaskRow) -> list[_Chain]:
        """Takes each chain's next draft; returns those whose draft is legal."""
        legal, asked, tokens = [], [], []
        for chain in chains:
            draft = chain.row.drafts[chain.row.legal_drafts]
            if chain.ended or chain.dead or not 0 <= draft < vocabulary_limit(chain.sequence):
                continue
            if chain.free():
                legal.append(chain)
            else:
                asked.append(chain)
                tokens.append(draft)
        for chain, token, accepted in zip(asked, tokens, self._accept(asked, tokens), strict=True):
            if not accepted:
                continue
            chain.taken += 1
            legal.append(chain)
            if token in chain.sequence.stop_tokens:
                chain.ended = self._backend.terminated(chain.sequence.matcher)
        for chain in legal:
            chain.row.legal_drafts += 1
            if chain.ended:
                out[chain.mask_row()] = chain.sequence.stop_row
        return legal

    def _accept(self, chains: Seq[_Chain], drafts: Seq[int]) -> list[bool]:
        if not chains:
            return []
        try:
            return self._backend.accept([chain.sequence.matcher for chain in chains], drafts)
        except Exception as error:
            # Which matchers took theirs is unknown. No draft is committed, so none is admitted.
            metrics.BACKEND_ERRORS.labels("draft").inc()
            for chain in chains:
                chain.sequence.matcher = None
                chain.taken = 0
                chain.row.reason, chain.row.message = "BACKEND_ERROR", f"draft: {error}"
            return [False] * len(chains)

    def _take_back(self, chains: Seq[_Chain]) -> None:
        if not chains:
            return
        try:
            self._backend.rollback(
                [chain.sequence.matcher for chain in chains], [chain.taken for chain in chains]
            )
        except Exception:
            metrics.BACKEND_ERRORS.labels("rollback").inc()
            for chain in chains:
                chain.sequence.matcher = None


def _begin(row: Row, out: MaskRow) -> _Chain | None:
    """The chain of a row that its grammar masks; the others get their rows here."""
    rows = slice(row.mask_row, row.mask_row + 1 + len(row.drafts))
    sequence = row.sequence
    if sequence is None or row.outcome in _WITHOUT_MASK:
        out[rows] = 0 if row.stop_row is None else row.stop_row
        return None
    if row.open() and sequence.terminated():
        row.ignored = len(sequence.history) - 1 - sequence.terminated_at
        row.outcome = Outcome.TERMINATED
    if not row.open():
        out[rows] = sequence.stop_row
        return None
    return _Chain(row, sequence)


def _bury(chain: _Chain, reason: str, message: str) -> None:
    """Ends a chain; the row fails when not even its first mask can be had."""
    chain.dead = True
    if chain.row.legal_drafts == 0:
        chain.row.end(Outcome.FAILED, reason, message)
    else:
        chain.row.reason = reason
        chain.row.message = f"after {chain.row.legal_drafts} drafts: {message}"


def _span(indices: list[int]) -> slice | list[int]:
    """The rows as a slice where they are consecutive, which copies nothing."""
    first = indices[0]
    if indices == list(range(first, first + len(indices))):
        return slice(first, first + len(indices))
    return indices


@lru_cache(maxsize=16)
def _free_row(vocabulary: int, width: int) -> MaskRow:
    """All of the vocabulary."""
    return row_of(range(vocabulary), width)
