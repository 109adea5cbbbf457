"""The open streams: how many there may be, and how they end when the service drains."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from engine_client.wire import sequences_pb2 as pb
from grammar_service import metrics
from grammar_service.errors import Exhausted, Unavailable


class Stream:
    """One stream. It takes a request, answers it, and is idle until the next."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._busy = False
        self.draining = False

    def requests(self, iterator: Iterator[pb.StepStreamRequest]) -> Iterator[pb.StepStreamRequest]:
        """The requests until the caller ends them, the call is cancelled, or the service drains."""
        while True:
            with self._lock:
                self._busy = False
                if self.draining:
                    return
            try:
                request = next(iterator)
            except StopIteration:
                return
            except Exception:
                # grpc raises a bare Exception here when the call is gone.
                if self._context.is_active() and not self.draining:
                    raise
                return
            with self._lock:
                if self.draining:
                    return
                self._busy = True
            yield request

    def drain(self) -> None:
        """Ends the stream: at once when it is idle, after its step when it isn't."""
        with self._lock:
            self.draining = True
            if not self._busy:
                self._context.cancel()


class Streams:
    """Counts streams, and drains them. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[Stream] = set()
        self._draining = False
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, context: grpc.ServicerContext) -> Iterator[Stream]:
        """A place for a stream. Raises Exhausted (TOO_MANY_STREAMS) or Unavailable (DRAINING)."""
        stream = Stream(context)
        with self._lock:
            if self._draining:
                raise Unavailable("DRAINING", "the service is stopping; reconnect")
            if len(self._open) >= self._limit:
                raise Exhausted("TOO_MANY_STREAMS", f"{self._limit} streams are open (max_streams)")
            self._open.add(stream)
            metrics.STREAMS.set(len(self._open))
        try:
            yield stream
        finally:
            with self._lock:
                self._open.discard(stream)
                metrics.STREAMS.set(len(self._open))

    def drain(self) -> None:
        """Opens no more streams, and ends those that are open."""
        with self._lock:
            self._draining = True
            streams = list(self._open)
        for stream in streams:
            stream.drain()
