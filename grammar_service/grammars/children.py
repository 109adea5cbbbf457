"""The compile children: as many processes as may compile at once, each watched by a thread.

     start ──ready──> idle ──job──> compiling ──answer──> idle
       │                               │
       └──────────── died, deadline or memory: killed, started anew for the next job

A compile that runs away is killed, and costs its own caller only.
"""

import contextlib
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from engine_client.spec import GrammarSpec
from engine_client.vocabulary import Vocabulary
from grammar_service import metrics
from grammar_service.backends import NAMES
from grammar_service.errors import (
    DeadlineExceeded,
    Exhausted,
    Internal,
    Invalid,
    ServiceError,
    Unavailable,
    Unenforced,
)
from grammar_service.grammars.schema.check import Limits

_MODULE = "grammar_service.grammars.child"
_START_SECONDS = 60.0
_WATCH_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a child made of a spec.

    Attributes:
        backend: The backend that took it.
        source: What that compiled: a form of the spec's source that means the same.
        data: The backend's bytes.
        compile_ms: Milliseconds that planning and compiling took.
        unenforced: Keywords that the masks won't enforce.
        annotations: Formats that they won't.
    """

    backend: str
    source: str
    data: bytes
    compile_ms: float
    unenforced: tuple[Unenforced, ...]
    annotations: tuple[Unenforced, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    spec: GrammarSpec
    vocabulary: Vocabulary
    future: Future[Artifact]


@dataclass(frozen=True, slots=True)
class _Warming:
    """A vocabulary that each child shall know before a compile needs it."""

    vocabulary: Vocabulary


class CompileChildren:
    """Runs compiles in child processes. Thread-safe.

    `deadline` is seconds of wall clock a compile, `memory_bytes` the growth of a child's resident
    memory a compile, `queue_limit` the jobs that may wait, `limits` those of schemas.
    """

    def __init__(
        self,
        workers: int,
        deadline: float,
        memory_bytes: int,
        queue_limit: int,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._deadline = deadline
        self._memory_bytes = memory_bytes
        self._queue_limit = queue_limit
        self._jobs: queue.SimpleQueue[_Job | _Warming | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._live: set[_Child] = set()
        self._threads = [
            threading.Thread(target=self._watch, name=f"compile-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, spec: GrammarSpec, vocabulary: Vocabulary) -> Future[Artifact]:
        """Queues a compile. The future raises a ServiceError. Raises Exhausted when full."""
        if self._jobs.qsize() >= self._queue_limit:
            raise Exhausted(
                "COMPILE_QUEUE_FULL",
                f"{self._queue_limit} compiles are waiting (compile_queue); try again later",
            )
        job = _Job(spec, vocabulary, Future())
        self._jobs.put(job)
        return job.future

    def warm(self, vocabulary: Vocabulary) -> None:
        """Has the children take a vocabulary in. One that is busy may leave it to another."""
        for _ in self._threads:
            self._jobs.put(_Warming(vocabulary))

    def close(self) -> None:
        """Ends all children; compiles that run or wait fail."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        for child in list(self._live):
            child.stop()  # wakes a thread that writes to it or reads from it
        for thread in self._threads:
            thread.join(timeout=5)
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if isinstance(job, _Job):
                    job.future.set_exception(Unavailable("DRAINING", "the service is stopping"))

    def _watch(self) -> None:
        """One thread: owns one child at a time, and feeds it."""
        child: _Child | None = None
        try:
            while not self._closed.is_set():
                # Started ahead of the job: its imports take seconds.
                child = child if child is not None and child.alive else _start(self._deadline)
                job = self._jobs.get()
                if job is None:
                    return
                if child is not None and child.died():
                    child.kill("died")
                    child = None
                child = child or _start(self._deadline)
                if child is not None:
                    self._live.add(child)
                self._do(child, job)
                if child is not None and not child.alive:
                    self._live.discard(child)
        finally:
            if child is not None and child.alive:
                child.kill("closed")

    def _do(self, child: "_Child | None", job: _Job | _Warming) -> None:
        """Does a job; whatever happens, its caller hears of it and the thread goes on."""
        future = job.future if isinstance(job, _Job) else Future[Artifact]()
        try:
            if child is None:
                raise Internal("COMPILE_CRASHED", "no compile child can be started")
            if isinstance(job, _Job):
                future.set_result(self._run(child, job))
            else:
                self._warm(child, job.vocabulary)
        except ServiceError as error:
            future.set_exception(error)
        except Exception as error:
            future.set_exception(Internal("COMPILE_CRASHED", repr(error)))
            if child is not None:
                child.kill("error")

    def _warm(self, child: "_Child", vocabulary: Vocabulary) -> None:
        if vocabulary.id in child.known:
            return
        child.wait_ready(self._closed)
        child.send(("vocabulary", vocabulary))
        self._answer(child)
        child.known.add(vocabulary.id)

    def _run(self, child: "_Child", job: _Job) -> Artifact:
        try:
            child.wait_ready(self._closed)
            self._warm(child, job.vocabulary)
            child.send(("compile", job.spec, job.vocabulary.id, self._limits))
            header = self._answer(child)
            if "need" in header:  # it had too many
                child.known.clear()
                return self._run(child, job)
            if "reason" in header:
                raise Invalid(header["reason"], header["message"], _named(header["unenforced"]))
            return Artifact(
                header["backend"],
                header["source"],
                child.receive(),
                header["compile_ms"],
                _named(header["unenforced"]),
                _named(header["annotations"]),
            )
        except BlockingIOError:
            child.kill("deadline")
            raise _past_deadline(self._deadline) from None
        except (EOFError, OSError):
            status = child.kill("crashed")
            raise Internal(
                "COMPILE_CRASHED", f"the compile ended its child process (exit status {status})"
            ) from None

    def _answer(self, child: "_Child") -> dict[str, Any]:
        """Waits for a child's header, within the deadline and the memory limit."""
        end = time.monotonic() + self._deadline
        base = child.memory()
        while not child.poll(_WATCH_SECONDS):
            if self._closed.is_set():
                child.kill("closed")
                raise Internal("COMPILE_CRASHED", "the service stopped during the compile")
            if time.monotonic() > end:
                child.kill("deadline")
                raise _past_deadline(self._deadline)
            if child.memory() - base > self._memory_bytes:
                child.kill("memory")
                raise Exhausted(
                    "COMPILE_MEMORY",
                    f"the compile took more than {self._memory_bytes} bytes (compile_memory_bytes)",
                )
        answer: dict[str, Any] = json.loads(child.receive())
        return answer


def _named(items: list[list[str]]) -> tuple[Unenforced, ...]:
    return tuple(Unenforced(pointer, keyword) for pointer, keyword in items)


def _past_deadline(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        "COMPILE_DEADLINE", f"the compile took longer than {seconds:g} s (compile_seconds)"
    )


def _start(seconds: float) -> "_Child | None":
    """A new child; None if the system has no room for a process."""
    try:
        return _Child(seconds)
    except OSError:
        metrics.COMPILE_CHILDREN_ENDED.labels("not_started").inc()
        return None


class _Child:
    """One child process and the socket to it."""

    def __init__(self, seconds: float) -> None:
        ours, theirs = socket.socketpair()
        # A child that is stopped neither reads nor writes; this thread mustn't wait for ever.
        timeout = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6) or 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), ",".join(NAMES)],
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

    def wait_ready(self, closed: threading.Event) -> None:
        """Waits until the child has imported its libraries. Raises EOFError if it dies."""
        end = time.monotonic() + _START_SECONDS
        while not self._ready:
            if closed.is_set() or time.monotonic() > end:
                raise EOFError
            if self._connection.poll(_WATCH_SECONDS):
                self._connection.recv_bytes()
                self._ready = True

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
