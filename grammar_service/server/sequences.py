"""SequenceService: steps, unary and on streams, forks, closes."""

import threading
import time
from collections.abc import Iterator

import grpc
import torch

from engine_client.stream import MAX_ROWS
from engine_client.wire import sequences_pb2 as pb
from engine_client.wire.sequences_pb2_grpc import SequenceServiceServicer
from grammar_service import metrics
from grammar_service.errors import Exhausted, Internal, ServiceError, Unavailable
from grammar_service.masks.regions import Regions
from grammar_service.sequences.stepper import Fork, Stepper
from grammar_service.server.columns import Bindings, read_rows, wire_outcomes, write_rows
from grammar_service.server.log import logger
from grammar_service.server.status import abort, code_of
from grammar_service.server.streams import Streams
from grammar_service.settings import ServiceSettings


class SequenceService(SequenceServiceServicer):
    """Translates, and delegates to the stepper."""

    def __init__(self, stepper: Stepper, settings: ServiceSettings, streams: Streams) -> None:
        self._stepper = stepper
        self._settings = settings
        self._streams = streams
        self._buffers = threading.local()

    def Step(self, request: pb.StepRequest, context: grpc.ServicerContext) -> pb.StepResponse:
        """One step that binds its rows itself."""
        regions = self._regions()
        try:
            return self._step(request, Bindings(), regions, "unary")
        except ServiceError as error:
            abort(context, error)
        finally:
            regions.close()

    def StepStream(
        self, request_iterator: Iterator[pb.StepStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepStreamResponse]:
        """Steps of one stream, answered in order."""
        bindings, regions = Bindings(), self._regions()
        context.send_initial_metadata(((MAX_ROWS, str(self._settings.max_rows)),))
        try:
            with self._streams.opened(context) as stream:
                for request in stream.requests(request_iterator):
                    yield self._answer(request, bindings, regions)
                if stream.draining:
                    raise Unavailable("DRAINING", "the service is stopping; reconnect")
        except ServiceError as error:
            abort(context, error)
        finally:
            regions.close()

    def ForkSequences(
        self, request: pb.ForkSequencesRequest, context: grpc.ServicerContext
    ) -> pb.ForkSequencesResponse:
        """Copies sequences."""
        try:
            self._check_count(len(request.forks))
        except ServiceError as error:
            abort(context, error)
        forks = [
            Fork(f.source_id, f.target_id, f.position if f.HasField("position") else None)
            for f in request.forks
        ]
        return pb.ForkSequencesResponse(outcomes=wire_outcomes(self._stepper.fork(forks)))

    def CloseSequences(
        self, request: pb.CloseSequencesRequest, context: grpc.ServicerContext
    ) -> pb.CloseSequencesResponse:
        """Frees sequences."""
        try:
            self._check_count(len(request.sequence_ids))
        except ServiceError as error:
            abort(context, error)
        return pb.CloseSequencesResponse(closed=self._stepper.close(request.sequence_ids))

    def GetSequence(
        self, request: pb.GetSequenceRequest, context: grpc.ServicerContext
    ) -> pb.GetSequenceResponse:
        """Shows a sequence."""
        try:
            state = self._stepper.show(request.sequence_id)
        except ServiceError as error:
            abort(context, error)
        opening = pb.Opening(
            grammar_id=state.opening.grammar_id,
            stop_token_ids=state.opening.stop_token_ids,
            constraint_start=state.opening.constraint_start,
        )
        return pb.GetSequenceResponse(
            sequence_id=request.sequence_id,
            opening=opening,
            tokens=state.tokens,
            outcome=wire_outcomes([state.outcome])[0],
            message=state.message,
            idle_seconds=state.idle_seconds,
        )

    def _answer(
        self, request: pb.StepStreamRequest, bindings: Bindings, regions: Regions
    ) -> pb.StepStreamResponse:
        """A step's answer, or its error in band: the stream goes on after both."""
        try:
            response = self._step(request.request, bindings, regions, "stream")
        except ServiceError as error:
            refusal = pb.StepError(code=code_of(error), reason=error.reason, message=error.message)
            return pb.StepStreamResponse(step=request.step, error=refusal)
        return pb.StepStreamResponse(step=request.step, response=response)

    def _step(
        self, request: pb.StepRequest, bindings: Bindings, regions: Regions, via: str
    ) -> pb.StepResponse:
        started = time.perf_counter()
        try:
            response = self._masked(request, bindings, regions)
        except ServiceError as error:
            metrics.STEPS.labels(via, error.reason.lower()).inc()
            raise
        except Exception as error:
            # Ours to mend: the caller gets an answer, the log the place.
            metrics.STEPS.labels(via, "error").inc()
            logger().exception("step failed")
            raise Internal(
                "STEP_FAILED", f"{type(error).__name__} in the service; see its log"
            ) from error
        metrics.STEPS.labels(via, "ok").inc()
        metrics.STEP_SECONDS.observe(time.perf_counter() - started)
        return response

    def _masked(
        self, request: pb.StepRequest, bindings: Bindings, regions: Regions
    ) -> pb.StepResponse:
        rows, count = read_rows(request, bindings, self._settings)
        region = request.region if request.HasField("region") else None
        buffer: list[torch.Tensor] = []

        def buffered(words: int) -> torch.Tensor:
            if region is not None:
                regions.check(region.name, region.offset, count * words * 4)
            buffer.append(self._buffer(count, words))
            if request.mask_rows and region is None:
                buffer[0].zero_()  # what lies between the entries' rows goes out too
            return buffer[0]

        self._stepper.step(rows, buffered)
        response = write_rows(rows)
        if not buffer:
            return response
        masks = buffer[0].numpy()
        if region is None:
            response.masks = masks.tobytes()
        elif not request.mask_rows:
            regions.write(region.name, region.offset, masks)
        else:
            for row in rows:
                part = masks[row.mask_row : row.mask_row + 1 + len(row.drafts)]
                start = region.offset + row.mask_row * masks.shape[1] * 4
                regions.write(region.name, start, part)
        return response

    def _buffer(self, count: int, words: int) -> torch.Tensor:
        """Rows that masks are filled in, kept by the thread."""
        held: torch.Tensor | None = getattr(self._buffers, "rows", None)
        if held is None or held.numel() < count * words:
            held = self._buffers.rows = torch.empty(count * words, dtype=torch.int32)
        return held[: count * words].view(count, words)

    def _regions(self) -> Regions:
        return Regions(self._settings.region_dir, self._settings.max_region_bytes)

    def _check_count(self, count: int) -> None:
        if count > self._settings.max_rows:
            raise Exhausted(
                "STEP_TOO_LARGE", f"{count} items; at most {self._settings.max_rows} (max_rows)"
            )
