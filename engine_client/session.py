"""The steps of one engine thread: its stream, its bound rows, its region; and what heals them.

A step is sent by `submit` and read by `collect`:

    submit ──> in flight ──answered──> rows that miss something are sent again with it ──> done
                   │  └────broken────> a new stream, a new region, sent again ────────────> done
                   └──── no answer by the deadline: stream and region are abandoned, policy ──> done

Abandoning the region is what makes a late write harmless: nobody reads there any more.
"""

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine_client.errors import Refused, ServiceError, UsageError
from engine_client.pending import PendingStep, Unanswered
from engine_client.regions import PARTS, Region
from engine_client.rows import MAX_ROWS, RowNumbers, binding_of
from engine_client.stats import Stats
from engine_client.stream import StepStream
from engine_client.types import Grammar, Note, Outcome, Row
from engine_client.wire import sequences_pb2 as pb

IN_FLIGHT = 2
"""Steps that may be submitted and not yet collected."""
_ROUNDS = 8
"""Answers in a row that settle no row: gap, sequence, grammar, what a second replica may add."""
_NO_REGION = {"REGION_NOT_FOUND", "REGION_INVALID", "REGION_TOO_SMALL"}
_HEALED = {
    pb.OUTCOME_HISTORY_GAP: "healed_history_gap",
    pb.OUTCOME_UNKNOWN_SEQUENCE: "healed_unknown_sequence",
    pb.OUTCOME_UNKNOWN_GRAMMAR: "healed_unknown_grammar",
}

_KNOWN = {*_HEALED, *Outcome}
_MASKED = {pb.OUTCOME_OK, pb.OUTCOME_COMPLETE, pb.OUTCOME_TERMINATED, pb.OUTCOME_REJECTED}

_log = logging.getLogger("engine_client")


class Session:
    """One thread's way to the service. Not thread-safe, but for `release`."""

    def __init__(
        self,
        connect: Callable[[], StepStream],
        recompile: Callable[[Grammar, float], None],
        unanswered: Unanswered,
        region_dir: Path | None,
        stats: Stats,
    ) -> None:
        self._connect = connect
        self._recompile = recompile
        self._unanswered = unanswered
        self._region_dir = region_dir
        self._use_regions = region_dir is not None
        self._stats = stats
        self._stream: StepStream | None = None
        self._regions: dict[int, Region] = {}
        """By words a mask: rows of two tokenizers may take turns."""
        self._rows = RowNumbers()
        self._last_part = 0
        # Weak: a step that an engine drops and never collects must not count for ever.
        self._in_flight: list[weakref.ref[PendingStep]] = []
        # The stream's threads would keep it open after the thread that stepped is gone.
        self._end_stream: weakref.finalize[[], Session] | None = None

    def begin(self, rows: Sequence[Row]) -> PendingStep:
        """Lays a step out, without sending it. Raises UsageError."""
        steps = [step for ref in self._in_flight if (step := ref()) and not step.collected]
        if len(steps) >= IN_FLIGHT:
            raise UsageError(f"{IN_FLIGHT} steps are in flight; collect one before the next submit")
        if len(rows) > MAX_ROWS:
            raise UsageError(f"a step has at most {MAX_ROWS} rows, not {len(rows)}")
        try:
            words = rows[0].grammar.words if rows else 0
            for row in rows:
                _check_row(row, words)
            drafts = (1 + len(row.drafts) for row in rows)
            first = list(itertools.accumulate(drafts, initial=0))
        except (AttributeError, TypeError) as error:
            raise UsageError(f"a row has a field of the wrong type: {error}") from None
        # Neither a part that somebody writes, nor that of the last submit, which is still read.
        taken = {step.part for step in steps} | {self._last_part}
        self._last_part = next(part for part in range(PARTS) if part not in taken)
        step = PendingStep(rows, first[:-1], first[-1], words, self._last_part)
        self._in_flight = [*map(weakref.ref, steps), weakref.ref(step)]
        return step

    def send(self, step: PendingStep) -> None:
        """Sends the whole step. Raises UsageError for tokens that aren't int32 numbers."""
        step.forget()
        step.stream = self._ready_stream()
        step.region = self._region_for(step)
        self._rows.free_released()
        # On a stream that hasn't seen a sequence yet, another replica may answer, or one that came
        # back: what it holds of the sequence, if anything, may be old.
        positions = {
            index: row.position
            if self._rows.has(row) and row.sequence_id not in self._unanswered
            else 0
            for index, row in enumerate(step.rows)
        }
        step.reply = step.stream.send(self._request(step, positions))

    def receive(self, step: PendingStep, deadline: float) -> bool:
        """Waits for the answer, and heals; False if some rows have none by time.monotonic()."""
        indices = step.unsettled()
        rounds = 0
        while rounds < _ROUNDS:
            reply = step.reply
            if not indices:
                return True
            if reply is None or not reply.wait(max(0.0, deadline - time.monotonic())):
                return False
            if not reply.broken and reply.response is not None:
                reply.broken = self._nonsense(step, indices, reply.response)
            if reply.broken:
                self._stats.add("resubmits")
                _log.warning("grammar stream broke, reconnecting: %s", reply.broken)
                self.abandon(step)
                self.send(step)
            elif reply.error is not None:
                self._refused(step, indices, reply.error)
            else:
                assert reply.response is not None
                self._take(step, indices, reply.response, deadline)
            before, indices = indices, step.unsettled()
            rounds = 0 if len(indices) < len(before) else rounds + 1
        return not indices

    def abandon(self, step: PendingStep) -> None:
        """Lets go of the step's stream and of all regions: nothing may write where we read."""
        if step.region is not None:
            step.region.unlink()
        if step.stream is None or step.stream is not self._stream:
            return
        step.stream.cancel()
        self._stream = None
        self._drop_regions()

    def _drop_regions(self) -> None:
        for region in self._regions.values():
            self._stats.add("regions_abandoned")
            region.unlink()
        self._regions.clear()

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Gives the rows of sequences free, with the next step. From any thread."""
        self._rows.release(sequence_ids)

    def close(self) -> None:
        """Ends the stream and removes the regions."""
        for region in self._regions.values():
            region.unlink()
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def _ready_stream(self) -> StepStream:
        if self._stream is not None and self._stream.broken:
            self._stream = None
            self._drop_regions()
        if self._stream is None:
            self._stream = self._connect()
            self._use_regions = self._region_dir is not None
            if self._end_stream is not None:
                self._end_stream.detach()
            self._end_stream = weakref.finalize(self, self._stream.cancel)
            self._rows = RowNumbers()
        return self._stream

    def _region_for(self, step: PendingStep) -> Region | None:
        """The region that the step's masks go to; None is inline."""
        if self._region_dir is None or not self._use_regions or step.total == 0:
            return None
        region = self._regions.get(step.words)
        if region is None or region.rows < step.total:
            rows = max(16, 1 << (step.total - 1).bit_length())
            try:
                # One that is too small is unlinked when the step that uses it is answered.
                region = self._regions[step.words] = Region(self._region_dir, rows, step.words)
            except OSError as error:
                self._give_regions_up(str(error))
                return None
            self._stats.add("regions_made")
        return region

    def _give_regions_up(self, why: str) -> None:
        _log.warning("no shared-memory regions, masks come inline: %s", why)
        self._stats.add("regions_given_up")
        self._use_regions = False  # until the next stream

    def _request(self, step: PendingStep, positions: dict[int, int]) -> pb.StepRequest:
        """A request for those rows of the step, each from its position on."""
        request = pb.StepRequest()
        rows = [step.rows[index] for index in positions]
        starts = list(positions.values())
        # All that can fail comes first: a request that isn't sent must bind nothing.
        try:
            for row, start in zip(rows, starts, strict=True):
                request.tokens.extend(row.tokens[start:])
            if step.total > len(step.rows):
                request.draft_counts.extend([len(row.drafts) for row in rows])
                for row in rows:
                    request.drafts.extend(row.drafts)
            bindings = [(row, binding_of(row)) for row in rows if not self._rows.has(row)]
        except (TypeError, ValueError) as error:
            raise UsageError(f"ids are text, tokens and drafts 32-bit numbers: {error}") from None
        request.positions.extend(starts)
        request.token_counts.extend(
            [len(row.tokens) - start for row, start in zip(rows, starts, strict=True)]
        )
        limit = self._stream.max_rows if self._stream is not None else MAX_ROWS
        self._rows.bind(request, rows, bindings, limit)
        if step.region is not None:
            request.region.name = step.region.name
            request.region.offset = step.part * step.region.part_bytes
            if len(rows) < len(step.rows):
                request.mask_rows.extend([step.mask_rows[index] for index in positions])
        return request

    def _nonsense(self, step: PendingStep, indices: list[int], response: pb.StepResponse) -> str:
        """What is wrong with an answer that no service of ours gives; nothing is ''."""
        masks = sum(1 + len(step.rows[index].drafts) for index in indices) * step.words * 4
        if (
            len(response.outcomes) != len(indices)
            or len(response.legal_drafts) not in (0, len(indices))
            or any(outcome not in _KNOWN for outcome in response.outcomes)
            or len(response.masks) not in (0, masks)
            or (not step.region and not response.masks and _MASKED & {*response.outcomes})
            or any(note.index >= len(indices) for note in response.notes)
        ):
            self._stats.add("nonsense")
            return "the service's answer doesn't fit the step"
        return ""

    def _take(
        self, step: PendingStep, indices: list[int], response: pb.StepResponse, deadline: float
    ) -> None:
        """Settles rows, and sends those again that miss something."""
        if step.region is not None and any(o in _MASKED for o in response.outcomes):
            step.region.unlink()  # the service has it mapped, which takes a row with a mask
        self._take_masks(step, indices, response)
        notes = {note.index: note for note in response.notes}
        legal = response.legal_drafts
        missing: dict[int, pb.Outcome] = {}
        for entry, (index, outcome) in enumerate(zip(indices, response.outcomes, strict=True)):
            note = notes.get(entry)
            if outcome in _HEALED:
                missing[index] = outcome
                continue
            step.outcomes[index] = Outcome(outcome)
            step.legal_drafts[index] = legal[entry] if legal else 0
            if note is not None:
                self._note(step, index, note)
        if missing:
            self._heal(step, missing, deadline)
        else:
            self._unanswered.discard(row.sequence_id for row in step.rows)

    def _note(self, step: PendingStep, index: int, note: pb.RowNote) -> None:
        if note.rewound:
            self._stats.add("rewound")
        rejected = step.outcomes[index] is Outcome.REJECTED
        accepted = note.history_length if rejected else 0
        step.notes[index] = Note(note.reason, note.message, note.rewound, accepted, note.ignored)

    def _heal(self, step: PendingStep, missing: dict[int, pb.Outcome], deadline: float) -> None:
        """Sends rows again with their whole history, their opening, and their grammar before them.

        After a gap as well: what is held before it may be older than the row's position.
        """
        indices = []
        for index, outcome in missing.items():
            self._stats.add(_HEALED[outcome])
            row = step.rows[index]
            if outcome != pb.OUTCOME_HISTORY_GAP:
                self._rows.free(row.sequence_id)  # bound again, with its opening
            if outcome == pb.OUTCOME_UNKNOWN_GRAMMAR:
                try:
                    self._recompile(row.grammar, deadline - time.monotonic())
                except ServiceError as error:
                    reason = error.reason if isinstance(error, Refused) else "GRAMMAR_LOST"
                    step.fail(index, reason, f"its grammar can't be had again: {error}")
                    continue
            indices.append(index)
        if not indices:
            return
        assert step.stream is not None
        try:
            step.reply = step.stream.send(self._request(step, dict.fromkeys(indices, 0)))
        except UsageError as error:
            for index in indices:
                step.fail(index, "TOKENS_INVALID", str(error))

    def _refused(self, step: PendingStep, indices: list[int], error: pb.StepError) -> None:
        """A step that wasn't taken as a whole."""
        if error.reason in _NO_REGION and step.region is not None:
            step.region.unlink()
            self._give_regions_up(error.message)
            self.send(step)
            return
        for index in indices:
            step.fail(index, error.reason, error.message)

    def _take_masks(self, step: PendingStep, indices: list[int], response: pb.StepResponse) -> None:
        """Where the masks are: in the region, or in the response."""
        import torch

        if step.region is not None:
            if step.masks is None:
                step.masks = step.region.masks(step.part, step.total)
            return
        if not response.masks:
            return
        # A bytearray: torch wants memory that may be written, and healing writes.
        masks = torch.frombuffer(bytearray(response.masks), dtype=torch.int32)
        masks = masks.view(-1, step.words)
        if len(indices) == len(step.rows):
            step.masks = masks
            return
        whole, start = step.writable(), 0
        for index in indices:
            first, count = step.mask_rows[index], 1 + len(step.rows[index].drafts)
            whole[first : first + count] = masks[start : start + count]
            start += count


def _check_row(row: Row, words: int) -> None:
    if row.grammar.words != words:
        raise UsageError("the rows of a step share one mask width; step tokenizers apart")
    if not 0 <= row.position <= len(row.tokens):
        raise UsageError(
            f"sequence {row.sequence_id!r}: position {row.position} lies outside its "
            f"{len(row.tokens)} tokens; pass all tokens after the prompt"
        )
