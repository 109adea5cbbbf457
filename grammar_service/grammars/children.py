"""The compile children: as many processes as may compile at once, each watched by a thread.

     start ──ready──> idle ──job──> compiling ──answer──> idle
       │                               │
       └───── died, deadline, memory or nobody waits: killed, started anew for the next job

One that its compiles left too large is replaced as well: xgrammar's cache, within its limit by its
own count, keeps some of what it evicts (75 kB a small expression).

A compile that runs away is killed, and costs its own caller only.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog

from engine_client.spec import GrammarSpec
from engine_client.vocabulary import Vocabulary
from grammar_service.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Internal,
    Invalid,
    ServiceError,
    Unavailable,
    Unenforced,
)
from grammar_service.grammars.child_process import WATCH_SECONDS, ChildProcess, start
from grammar_service.grammars.schema.check import Limits

_log: Any = structlog.get_logger("grammar_service")
_WORTH_A_CHILD = 1.0
"""Seconds that a compile gets though nobody waits for it any more: a new child takes 2 s of a core
to start, so a caller who starts compiles and hangs up would otherwise cost more than the compiles.
"""


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
    """A compile. Its future is pending until the end, so that it may be cancelled all the while."""

    spec: GrammarSpec
    vocabulary: Vocabulary
    future: Future[Artifact]

    def settle(self, outcome: Artifact | Exception) -> None:
        """Tells the caller, if there still is one."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(frozen=True, slots=True)
class _Warming:
    """A vocabulary that each child shall know before a compile needs it."""

    vocabulary: Vocabulary


class _Jobs:
    """The jobs that wait, the oldest first. Cancelled ones take up no place."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[_Job | _Warming] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def add(self, job: _Job) -> None:
        """Queues a compile. Raises Exhausted when full."""
        with self._changed:
            compiles = [each for each in self._waiting if isinstance(each, _Job)]
            gone = [each for each in compiles if each.future.cancelled()]
            for each in gone:  # with their specs
                self._waiting.remove(each)
            if len(compiles) - len(gone) >= self._limit:
                raise Exhausted(
                    "COMPILE_QUEUE_FULL",
                    f"{self._limit} compiles are waiting (compile_queue); try again later",
                )
            self._waiting.append(job)
            self._changed.notify()

    def warm(self, vocabulary: Vocabulary, times: int) -> None:
        """Queues a vocabulary for each child."""
        with self._changed:
            self._waiting.extend(_Warming(vocabulary) for _ in range(times))
            self._changed.notify_all()

    def next(self) -> _Job | _Warming | None:
        """Waits for a job; None once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.popleft()

    def close(self) -> list[_Job]:
        """Ends the waiting; returns the compiles that nobody will do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left = [job for job in self._waiting if isinstance(job, _Job)]
            self._waiting.clear()
        return left


class CompileChildren:
    """Runs compiles in child processes. Thread-safe.

    Args:
        workers: How many.
        backends: Names of the libraries that they compile with.
        deadline: Seconds of wall clock that a compile may take.
        load_seconds: Seconds of a core that loading what it made may take the service.
        memory_bytes: Growth of a child's resident memory that it may cause.
        kept_bytes: Growth by all of its compiles that makes a child be replaced.
        queue_limit: Compiles that may wait.
        limits: Those of schemas.
    """

    def __init__(
        self,
        workers: int,
        backends: Sequence[str],
        deadline: float,
        load_seconds: float,
        memory_bytes: int,
        kept_bytes: int,
        queue_limit: int,
        limits: Limits,
    ) -> None:
        self._backends = tuple(backends)
        self._limits = limits
        self._deadline = deadline
        self._load_seconds = load_seconds
        self._memory_bytes = memory_bytes
        self._kept_bytes = kept_bytes
        self._jobs = _Jobs(queue_limit)
        self._closed = threading.Event()
        self._live: set[ChildProcess] = set()
        self._threads = [
            threading.Thread(target=self._watch, name=f"compile-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, spec: GrammarSpec, vocabulary: Vocabulary) -> Future[Artifact]:
        """Queues a compile. Raises Exhausted when full.

        The future raises a ServiceError. Cancelling it ends the compile, and with it the child, so
        that its place is free. What is called when it is done is called by the child's thread.
        """
        job = _Job(spec, vocabulary, Future())
        self._jobs.add(job)
        return job.future

    def warm(self, vocabulary: Vocabulary) -> None:
        """Has the children take a vocabulary in. One that is busy may leave it to another."""
        self._jobs.warm(vocabulary, len(self._threads))

    def close(self) -> None:
        """Ends all children; compiles that run or wait fail."""
        self._closed.set()
        left = self._jobs.close()
        for child in list(self._live):
            child.stop()  # wakes a thread that writes to it or reads from it
        for thread in self._threads:
            thread.join(timeout=5)
        for job in left:
            job.settle(Unavailable("DRAINING", "the service is stopping"))

    def _watch(self) -> None:
        """One thread: owns one child at a time, and feeds it."""
        child: ChildProcess | None = None
        try:
            while not self._closed.is_set():
                # Started ahead of the job: its imports take seconds.
                child = child if child is not None and child.alive else self._start()
                job = self._jobs.next()
                if job is None:
                    return
                if child is not None and child.died():
                    child.kill("died")
                    child = None
                child = child or self._start()
                if child is not None:
                    self._live.add(child)
                self._do(child, job)
                if child is not None and child.memory() - child.base > self._kept_bytes:
                    child.kill("large")
                if child is not None and not child.alive:
                    self._live.discard(child)
        finally:
            if child is not None and child.alive:
                child.kill("closed")

    def _start(self) -> ChildProcess | None:
        return start(self._backends, self._deadline)

    def _do(self, child: ChildProcess | None, job: _Job | _Warming) -> None:
        """Does a job; whatever happens, its caller hears of it and the thread goes on."""
        outcome: Artifact | Exception | None = None
        try:
            if child is None:
                raise Internal("COMPILE_CRASHED", "no compile child can be started")
            if isinstance(job, _Job):
                outcome = self._run(child, job)
            else:
                self._warm(child, job.vocabulary)
        except ServiceError as error:
            outcome = error
        except Exception as error:
            outcome = Internal("COMPILE_CRASHED", repr(error))
            if child is not None:
                child.kill("error")
        if isinstance(job, _Job):
            assert outcome is not None
            job.settle(outcome)

    def _warm(self, child: ChildProcess, vocabulary: Vocabulary) -> None:
        if vocabulary.id in child.known:
            return
        child.wait_ready(self._closed)
        before = child.memory()
        child.send(("vocabulary", vocabulary))
        self._answer(child)
        child.base += child.memory() - before
        child.known.add(vocabulary.id)

    def _run(self, child: ChildProcess, job: _Job) -> Artifact:
        try:
            child.wait_ready(self._closed)
            self._warm(child, job.vocabulary)
            if job.future.cancelled():
                raise _nobody_waits()
            child.send(("compile", job.spec, job.vocabulary.id, self._limits, self._load_seconds))
            header = self._answer(child, job.future)
            if "need" in header:  # it had too many
                child.known.clear()
                return self._run(child, job)
            if "failed" in header:
                _log.error("compile_failed", error=header["failed"], trace=header["trace"])
                raise Internal(
                    "COMPILE_CRASHED", f"the compile failed with {header['failed']}, in its child"
                )
            if "load_seconds" in header:
                raise _slow_to_load(header["load_seconds"], self._load_seconds)
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

    def _answer(
        self, child: ChildProcess, wanted: Future[Artifact] | None = None
    ) -> dict[str, Any]:
        """Waits for a child's header, within the deadline and the memory limit.

        A compile ends as well when its future is cancelled.
        """
        started = time.monotonic()
        base = child.memory()
        while not child.poll(WATCH_SECONDS):
            seconds = time.monotonic() - started
            if self._closed.is_set():
                child.kill("closed")
                raise Internal("COMPILE_CRASHED", "the service stopped during the compile")
            if wanted is not None and wanted.cancelled() and seconds > _WORTH_A_CHILD:
                child.kill("cancelled")
                raise _nobody_waits()
            if seconds > self._deadline:
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


def _slow_to_load(seconds: float, limit: float) -> DeadlineExceeded:
    # No word of the spec's alone: it isn't kept as a refusal.
    return DeadlineExceeded(
        "COMPILE_DEADLINE",
        f"loading the compiled grammar would take the service {seconds:.1f} s of a core; at most "
        f"{limit:g} (load_seconds)",
    )


def _nobody_waits() -> Cancelled:
    return Cancelled("COMPILE_CANCELLED", "nobody waits for the compile any more")
