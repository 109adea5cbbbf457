"""One StepStream call: a queue that gRPC sends from, and a thread that drains the answers.

The thread is what makes a collect cheap: reading from the call where the engine waits took 400
microseconds and more, reading what the thread has put down 13.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterator

import grpc

from engine_client.wire import sequences_pb2 as pb
from engine_client.wire.sequences_pb2_grpc import SequenceServiceStub

MAX_ROWS = "grammar-max-rows"
"""Initial metadata of a stream: the server's max_rows."""


class Reply:
    """The answer to one step, when it comes: `response`, `error` or `broken`."""

    __slots__ = ("_done", "broken", "error", "response", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.response: pb.StepResponse | None = None
        self.error: pb.StepError | None = None
        self.broken = ""
        """Why the stream ended before the answer came."""
        self._done = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Waits for any of the three; False when the time is over."""
        return self._done.wait(seconds)

    def settle(self) -> None:
        """Wakes who waits."""
        self._done.set()


class StepStream:
    """Sends steps, and settles their replies in order. `send` and `cancel` are for one thread."""

    def __init__(self, stub: SequenceServiceStub) -> None:
        self._requests: queue.SimpleQueue[pb.StepStreamRequest | None] = queue.SimpleQueue()
        self._waiting: deque[Reply] = deque()
        self._lock = threading.Lock()
        self._ended = ""
        self._steps = 0
        self.max_rows = 4096
        """Row numbers that the service has for a stream, once it said so."""
        self._call = stub.StepStream(iter(self._requests.get, None), wait_for_ready=True)
        self._reader = threading.Thread(target=self._read, name="grammar-stream", daemon=True)
        self._reader.start()

    @property
    def broken(self) -> bool:
        """Whether it has ended; a step sent now would not be answered."""
        return bool(self._ended)

    def send(self, request: pb.StepRequest) -> Reply:
        """Queues a step. Returns at once; a reply on an ended stream is settled as broken."""
        self._steps += 1
        reply = Reply(self._steps)
        with self._lock:
            if self._ended:
                reply.broken = self._ended
                reply.settle()
                return reply
            self._waiting.append(reply)
        self._requests.put(pb.StepStreamRequest(step=reply.step, request=request))
        return reply

    def cancel(self) -> None:
        """Ends the stream; what waits is settled as broken."""
        self._requests.put(None)
        self._call.cancel()

    def _read(self) -> None:
        try:
            for answer in self._answers():
                with self._lock:
                    reply = self._waiting.popleft() if self._waiting else None
                if reply is None or answer.step != reply.step:
                    self._end("the service answered a step that wasn't asked", reply)
                    self._call.cancel()
                    return
                if answer.WhichOneof("result") == "error":
                    reply.error = answer.error
                else:
                    reply.response = answer.response
                reply.settle()
            self._end("the service ended the stream", None)
        except grpc.RpcError as error:
            self._end(f"{error.code().name}: {error.details()}", None)

    def _answers(self) -> Iterator[pb.StepStreamResponse]:
        for key, value in self._call.initial_metadata():
            if key == MAX_ROWS and str(value).isdecimal():
                self.max_rows = max(1, int(value))
        yield from self._call

    def _end(self, why: str, reply: Reply | None) -> None:
        with self._lock:
            self._ended = why
            broken = [reply] if reply else []
            broken += self._waiting
            self._waiting.clear()
        # Lets gRPC's sending thread go.
        self._requests.put(None)
        for waiting in broken:
            waiting.broken = why
            waiting.settle()
