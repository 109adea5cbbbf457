"""Which sequence has which row number on a stream, and how it was opened there."""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine_client.types import Row
from engine_client.wire import sequences_pb2 as pb

MAX_ROWS = 4096
"""Rows a step; a service may have fewer (its max_rows)."""


class _Bound(NamedTuple):
    number: int
    grammar_id: str
    stop_token_ids: tuple[int, ...]
    constraint_start: int


class RowNumbers:
    """The row numbers of one stream. For the stream's thread, but for `release`."""

    def __init__(self) -> None:
        self._bound: OrderedDict[str, _Bound] = OrderedDict()
        self._numbers = itertools.count()
        self._free: list[int] = []
        self._releases: list[int] = []
        self._released: set[str] = set()

    def has(self, row: Row) -> bool:
        """Whether the stream knows the row's sequence, opened as the row says."""
        bound = self._bound.get(row.sequence_id)
        return (
            bound is not None
            and bound.grammar_id == row.grammar.id
            and bound.stop_token_ids == row.stop_token_ids
            and bound.constraint_start == row.constraint_start
        )

    def bind(
        self,
        request: pb.StepRequest,
        rows: Sequence[Row],
        bindings: list[tuple[Row, pb.Binding]],
        limit: int,
    ) -> None:
        """Writes bindings, releases and the rows' numbers to a request that is sent for sure."""
        for row in rows:
            if row.sequence_id in self._bound:
                self._bound.move_to_end(row.sequence_id)
        for row, binding in bindings:
            bound = self._bound.pop(row.sequence_id, None)
            binding.row = bound.number if bound else self._new(max(limit, len(rows)))
            request.bindings.append(binding)
            self._bound[row.sequence_id] = _Bound(
                binding.row, row.grammar.id, row.stop_token_ids, row.constraint_start
            )
        request.releases.extend(self._releases)
        self._releases.clear()
        request.rows.extend([self._bound[row.sequence_id].number for row in rows])

    def free(self, sequence_id: str) -> None:
        """Takes a sequence's number back; its release goes with the next request."""
        bound = self._bound.pop(sequence_id, None)
        if bound is not None:
            self._free.append(bound.number)
            self._releases.append(bound.number)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Has sequences freed before the next request. From any thread."""
        self._released.update(i for i in sequence_ids if i in self._bound)

    def free_released(self) -> None:
        """Frees what other threads released."""
        while self._released:
            self.free(self._released.pop())

    def _new(self, limit: int) -> int:
        """A number that is free; the sequence stepped longest ago may have to give its own."""
        if len(self._bound) >= limit:
            self.free(next(iter(self._bound)))
        return self._free.pop() if self._free else next(self._numbers)


def binding_of(row: Row) -> pb.Binding:
    """The binding of a row, without its number. Raises TypeError or ValueError."""
    opening = pb.Opening(
        grammar_id=row.grammar.id,
        stop_token_ids=row.stop_token_ids,
        constraint_start=row.constraint_start,
    )
    return pb.Binding(sequence_id=row.sequence_id, opening=opening)
