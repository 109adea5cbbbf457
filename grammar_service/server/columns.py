"""The columns of a step on the wire, to rows and back."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import cast

from engine_client.wire import sequences_pb2 as pb
from grammar_service.errors import Exhausted, Invalid
from grammar_service.sequences.rows import Outcome, Row
from grammar_service.sequences.sequence import Opening
from grammar_service.settings import ServiceSettings

_NOTED = {Outcome.REJECTED, Outcome.HISTORY_GAP}


def opening_of(opening: pb.Opening) -> Opening:
    """An opening in our words."""
    stop_token_ids = tuple(opening.stop_token_ids)
    return Opening(opening.grammar_id, stop_token_ids, opening.constraint_start)


class Bindings:
    """Which sequence stands in which row, and how it was opened; of a stream, or a unary step."""

    def __init__(self) -> None:
        self._bound: dict[int, tuple[str, Opening | None]] = {}

    def take(self, request: pb.StepRequest, max_rows: int) -> set[int]:
        """Applies releases and bindings; returns the rows that were bound. Raises Invalid."""
        for row in request.releases:
            self._bound.pop(row, None)
        for binding in request.bindings:
            if binding.row >= max_rows:
                raise Invalid(
                    "STEP_MALFORMED", f"row {binding.row}: rows are below {max_rows} (max_rows)"
                )
            opening = opening_of(binding.opening) if binding.HasField("opening") else None
            self._bound[binding.row] = (binding.sequence_id, opening)
        return {binding.row for binding in request.bindings}

    def get(self, row: int) -> tuple[str | None, Opening | None]:
        """The sequence id in a row, and its opening."""
        return self._bound.get(row, (None, None))


def read_rows(
    request: pb.StepRequest, bindings: Bindings, settings: ServiceSettings
) -> tuple[list[Row], int]:
    """The rows of a step, and how many mask rows they lie in.

    Raises Invalid with STEP_MALFORMED or Exhausted with STEP_TOO_LARGE.
    """
    fresh = bindings.take(request, settings.max_rows)
    numbers = list(request.rows)
    count = len(numbers)
    if count > settings.max_rows:
        raise Exhausted(
            "STEP_TOO_LARGE", f"{count} entries; at most {settings.max_rows} (max_rows)"
        )
    positions = _column("positions", request.positions, count, required=True)
    token_counts = _column("token_counts", request.token_counts, count)
    draft_counts = _column("draft_counts", request.draft_counts, count)
    tokens = _parts("tokens", request.tokens, token_counts)
    drafts = _parts("drafts", request.drafts, draft_counts)
    if count and max(draft_counts) > settings.max_drafts:
        raise Exhausted(
            "STEP_TOO_LARGE", f"at most {settings.max_drafts} drafts an entry (max_drafts)"
        )
    total = count + len(request.drafts)
    if total > settings.max_mask_rows:
        raise Exhausted(
            "STEP_TOO_LARGE", f"{total} masks; at most {settings.max_mask_rows} (max_mask_rows)"
        )
    if request.mask_rows:
        first = _column("mask_rows", request.mask_rows, count)
        total = _check_apart(first, draft_counts, settings.max_mask_rows)
    else:
        first = list(accumulate((1 + drafted for drafted in draft_counts), initial=0))[:count]
    rows = []
    for number, position, row_tokens, row_drafts, mask_row in zip(
        numbers, positions, tokens, drafts, first, strict=True
    ):
        sequence_id, opening = bindings.get(number)
        rows.append(
            Row(sequence_id, position, row_tokens, row_drafts, mask_row, opening, number in fresh)
        )
    return rows, total


def wire_outcomes(outcomes: Iterable[Outcome]) -> "list[pb.Outcome]":
    """Outcomes in the contract's type; the numbers are the same."""
    return cast("list[pb.Outcome]", list(outcomes))


def write_rows(rows: Sequence[Row]) -> pb.StepResponse:
    """The answer to a step, without its masks."""
    response = pb.StepResponse(outcomes=wire_outcomes(row.outcome for row in rows))
    if any(row.drafts for row in rows):
        response.legal_drafts.extend([row.legal_drafts for row in rows])
    for index, row in enumerate(rows):
        if row.outcome in _NOTED or row.reason or row.rewound or row.ignored:
            response.notes.add(
                index=index,
                reason=row.reason,
                message=row.message[:500],
                rewound=row.rewound,
                accepted=row.accepted if row.outcome is Outcome.REJECTED else 0,
                ignored=row.ignored,
                history_length=row.history_length,
            )
    return response


def _column(name: str, values: Sequence[int], count: int, *, required: bool = False) -> list[int]:
    column = list(values)
    if not column and not required:
        return [0] * count
    if len(column) != count:
        raise Invalid("STEP_MALFORMED", f"{name} has {len(column)} entries, rows has {count}")
    return column


def _parts(name: str, values: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    flat = list(values)
    if sum(counts) != len(flat):
        raise Invalid(
            "STEP_MALFORMED", f"{name} has {len(flat)} values, their counts sum to {sum(counts)}"
        )
    parts, end = [], 0
    for count in counts:
        parts.append(flat[end : end + count])
        end += count
    return parts


def _check_apart(first: Sequence[int], draft_counts: Sequence[int], limit: int) -> int:
    """How many mask rows there are up to the last one. Raises Invalid where entries overlap."""
    end = 0
    for start, drafts in sorted(zip(first, draft_counts, strict=True)):
        if start < end:
            raise Invalid("STEP_MALFORMED", f"mask row {start} belongs to two entries")
        end = start + 1 + drafts
    if end > limit:
        raise Invalid("STEP_MALFORMED", f"mask row {end - 1}: at most {limit} (max_mask_rows)")
    return end
