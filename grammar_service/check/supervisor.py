"""Runs a check: feeds a worker, replaces it when it crashes or hangs, prints reports in order.

When a worker ends early, each of the cases that it had started may be to blame: each of them runs
again alone, and one that ends its worker alone is the guilty one.
"""

import json
import sys
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from grammar_service.check.cases import CaseRefused, Plan, Report, read_case, refused
from grammar_service.check.process import CheckError, Job, WorkerLost, WorkerProcess

_AHEAD = 512
"""Cases that a worker has at most: enough for its rows and its compiles."""
_STARTS = 3
"""Workers in a row that may be lost before they are ready."""


def check(
    tokenizer: Path,
    width: int | None,
    lines: Iterable[bytes],
    output: BinaryIO,
    timeout: float,
    jobs: int,
) -> None:
    """Writes the report of each case, in their order. Raises CheckError or OSError."""
    with tempfile.NamedTemporaryFile(prefix="gs-check-", suffix=".jsonl") as spool:
        runnable, invalid, number = [], {}, 0
        for line in lines:
            if not line.strip():
                continue
            try:
                runnable.append(Job(number, read_case(line).id, spool.tell()))
                spool.write(line)
            except CaseRefused as error:
                invalid[number] = refused(error.id, error.reason, error.message)
            number += 1
        spool.flush()
        jobs = max(1, min(jobs, len(runnable)))
        plan = Plan(str(tokenizer), width, spool.name, "", "", jobs, timeout)
        with _Reports(output, number) as reports, _Supervisor(plan, runnable, reports) as run:
            for index, report in invalid.items():
                reports.add(index, report)
            run.run()


class _Supervisor:
    """The workers of one check, one at a time."""

    def __init__(self, plan: Plan, jobs: Iterable[Job], reports: "_Reports") -> None:
        self._plan = plan
        self._reports = reports
        self._waiting = deque(jobs)
        self._suspects: deque[Job] = deque()
        self._alone = False
        """Whether the worker has one suspect and nothing else."""
        self._worker = self._start()

    def __enter__(self) -> "_Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def run(self) -> None:
        """Runs all cases. Raises CheckError."""
        while self._waiting or self._suspects or self._worker.given:
            self._feed()
            try:
                job, report = self._worker.next_report()
            except WorkerLost as lost:
                self._replace(lost)
            else:
                self._reports.add(job.number, report)

    def _feed(self) -> None:
        given = len(self._worker.given)
        if self._suspects and not given:
            self._alone = True
            self._worker.give([self._suspects.popleft()])
        elif self._waiting and (not given or (given <= _AHEAD // 2 and not self._alone)):
            self._alone = False
            count = min(_AHEAD - given, len(self._waiting))
            self._worker.give([self._waiting.popleft() for _ in range(count)])

    def _replace(self, lost: WorkerLost) -> None:
        """Sorts the cases of a lost worker, and starts another."""
        given, suspects = list(self._worker.given.values()), self._worker.suspects()
        if self._alone:
            for job in suspects:
                self._reports.add(job.number, refused(job.id, lost.reason, lost.message))
        else:
            self._suspects.extend(suspects)
            self._waiting.extendleft(job for job in reversed(given) if job not in suspects)
        self._worker.close()
        self._worker = self._start()

    def _start(self) -> WorkerProcess:
        for _ in range(_STARTS):
            worker = WorkerProcess(self._plan)
            try:
                worker.wait_ready()
            except BaseException as error:
                worker.close()
                if not isinstance(error, WorkerLost):
                    raise
            else:
                return worker
        raise CheckError(f"{_STARTS} workers in a row didn't start")


class _Reports:
    """Prints reports in the order of their cases, and progress where a person watches."""

    def __init__(self, output: BinaryIO, total: int) -> None:
        self._output = output
        self._held: dict[int, Report] = {}
        self._next = 0
        columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # On a terminal the reports are progress enough, and a bar would be torn by them.
        watched = sys.stderr.isatty() and not output.isatty()
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=not watched, redirect_stdout=False)
        self._task = self._bar.add_task("checking", total=total)

    def __enter__(self) -> "_Reports":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, number: int, report: Report) -> None:
        """Takes a report, and prints it as soon as all before it are printed."""
        self._held[number] = report
        self._bar.advance(self._task)
        while self._next in self._held:
            line = json.dumps(self._held.pop(self._next), ensure_ascii=False) + "\n"
            # Half a surrogate pair becomes its escape, which JSON has too.
            self._output.write(line.encode(errors="backslashreplace"))
            self._output.flush()
            self._next += 1
