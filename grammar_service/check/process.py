"""A worker's process, as the supervisor sees it: started, fed, watched and ended."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from grammar_service.check.cases import Plan, Report

_MODULE = "grammar_service.check.worker"
_SHARED_MEMORY = "/dev/shm"
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_COMPILE_SECONDS = 60.0
"""What a compile may take beyond a case's seconds: the service has a deadline for it, but its child
may have to start first."""


class Job(NamedTuple):
    """A case that a worker can run: its number, its id, and where its line begins."""

    number: int
    id: str | int
    offset: int


class CheckError(Exception):
    """The check can't run at all; the message says why."""


class WorkerLost(Exception):
    """A worker crashed or hung."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class WorkerProcess:
    """One worker and the socket to it. Close it in the end."""

    def __init__(self, plan: Plan) -> None:
        self._timeout = plan.timeout
        self._directory = tempfile.mkdtemp(prefix="gs-check-")
        shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self._region_dir = tempfile.mkdtemp(prefix="gs-check-", dir=shared)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # ours is for reports, whatever a library prints
                pass_fds=[theirs.fileno()],
                process_group=0,  # a terminal's interrupt is the supervisor's to handle
            )
        self._connection = Connection(ours.detach())
        self._ready = False
        self.given: dict[int, Job] = {}
        """Cases without a report, by number."""
        self._due: dict[int, float] = {}
        """By when the worker has to go on with each that it started: time.monotonic()."""
        plan = dataclasses.replace(plan, directory=self._directory, region_dir=self._region_dir)
        self._send(dataclasses.asdict(plan))

    def wait_ready(self) -> None:
        """Waits for its server. Raises WorkerLost, or CheckError where another would fail too."""
        answer = self._receive(_START_SECONDS)
        if "error" in answer:
            raise CheckError(answer["error"])
        self._ready = True

    def give(self, jobs: Sequence[Job]) -> None:
        """Sends cases, as one small message: it may not block on a worker that hangs."""
        self.given.update({job.number: job for job in jobs})
        self._send([(job.number, job.offset) for job in jobs])

    def next_report(self) -> tuple[Job, Report]:
        """Waits for the report of any case. Raises WorkerLost."""
        while True:
            now = time.monotonic()
            due = min(self._due.values(), default=now + self._timeout)
            match self._receive(due - now):
                case {"compiling": int(number)}:
                    self._due[number] = time.monotonic() + self._timeout + _COMPILE_SECONDS
                case {"stepping": int(number)}:
                    self._due[number] = time.monotonic() + self._timeout
                case {"finished": int(number), "report": report}:
                    del self._due[number]
                    return self.given.pop(number), report

    def suspects(self) -> list[Job]:
        """The cases that may be to blame for the end of this worker."""
        started = [job for job in self.given.values() if job.number in self._due]
        return started or list(self.given.values())

    def kill(self) -> int:
        """Ends it now; returns the exit status."""
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """Ends it, in good order if it has nothing to do, and removes what it leaves."""
        if self.given or not self._ready:
            self.kill()
        self._connection.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        shutil.rmtree(self._region_dir, ignore_errors=True)

    def _send(self, message: Any) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            return  # it is dead, as the next receive says

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next message, if it comes within the time. Raises WorkerLost."""
        if not self._connection.poll(max(0.0, seconds)):
            self.kill()
            raise WorkerLost("CHECK_TIMEOUT", f"no result within {self._timeout:g} s (--timeout)")
        try:
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            status = self.kill()
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            raise WorkerLost("CHECK_CRASHED", f"its process ended with {how}") from None
        return message
