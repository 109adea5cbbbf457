"""One compile child as its parent sees it: a process, the socket to it, and its memory."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from multiprocessing.connection import Connection

import psutil

from grammar_service import metrics

_MODULE = "grammar_service.grammars.child"
_START_SECONDS = 60.0
WATCH_SECONDS = 0.05
"""How often one who waits for a child looks whether it still should."""


def start(backends: Collection[str], seconds: float) -> "ChildProcess | None":
    """A new child; None if the system has no room for a process."""
    try:
        return ChildProcess(backends, seconds)
    except OSError:
        metrics.COMPILE_CHILDREN_ENDED.labels("not_started").inc()
        return None


class ChildProcess:
    """One child process and the socket to it."""

    def __init__(self, backends: Collection[str], seconds: float) -> None:
        ours, theirs = socket.socketpair()
        # A child that is stopped neither reads nor writes; this thread mustn't wait for ever.
        timeout = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6) or 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), ",".join(backends)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # One thread: a compile is one core's work, and steps need the others.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self._connection = Connection(ours.detach())
        self._stats = psutil.Process(self._process.pid)
        self._ready = False
        self.known: set[str] = set()
        """Ids of the vocabularies that it was sent."""
        self.alive = True
        self.base = 0
        """Resident bytes without what compiles left."""

    def wait_ready(self, closed: threading.Event) -> None:
        """Waits until the child has imported its libraries. Raises EOFError if it dies."""
        end = time.monotonic() + _START_SECONDS
        while not self._ready:
            if closed.is_set() or time.monotonic() > end:
                raise EOFError
            if self._connection.poll(WATCH_SECONDS):
                self._connection.recv_bytes()
                self._ready = True
                self.base = self.memory()

    def send(self, job: tuple[object, ...]) -> None:
        """Sends a job. Raises OSError if the child is dead."""
        self._connection.send(job)

    def poll(self, seconds: float) -> bool:
        """Whether something can be read within the time, the end of the stream included."""
        return self._connection.poll(seconds)

    def receive(self) -> bytes:
        """The next message. Raises EOFError if the child is dead."""
        return self._connection.recv_bytes()

    def stop(self) -> None:
        """Ends the process, from any thread; who owns the child finds out."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def died(self) -> bool:
        """Whether the process ended by itself, or by somebody else's hand."""
        return self._process.poll() is not None

    def memory(self) -> int:
        """Resident bytes; 0 once it is dead."""
        try:
            return int(self._stats.memory_info().rss)
        except psutil.Error:
            return 0

    def kill(self, why: str) -> int:
        """Ends the process; returns its exit status."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        status = self._process.wait()
        self._connection.close()
        metrics.COMPILE_CHILDREN_ENDED.labels(why).inc()
        return status
