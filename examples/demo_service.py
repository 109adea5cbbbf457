"""The demo's service: a process of its own that can be killed and started again."""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START_SECONDS = 60.0


class Service:
    """`grammar_service serve` on a Unix socket, with shared memory, both in fresh directories.

    Use it in a `with`: leaving it ends the process and removes the directories.

    Args:
        python: An interpreter that has the service; an engine's environment needs another.
    """

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python
        self._directory = Path(tempfile.mkdtemp(prefix="grammar-demo-"))
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.region_dir = Path(tempfile.mkdtemp(prefix="grammar-demo-", dir=shared))
        self.target = f"unix:{self._directory}/service.sock"
        self._process: subprocess.Popen[str] | None = None

    def launch(self) -> None:
        """Starts the process, and doesn't wait for it."""
        command = [self._python, "-m", "grammar_service", "serve", "--listen", self.target]
        command += ["--region-dir", str(self.region_dir), "--log-level", "warning"]
        with _signals_held():  # a process that nobody knows of could not be ended
            # A session of its own: Ctrl-C is the demo's to handle.
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, start_new_session=True
            )

    def wait_ready(self) -> float:
        """Waits until it listens; returns the seconds that took. Raises RuntimeError."""
        assert self._process is not None
        assert self._process.stdout is not None
        begin = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            said = selector.select(_START_SECONDS) and self._process.stdout.readline()
        if not said:
            raise RuntimeError(f"the service didn't start within {_START_SECONDS:.0f} s")
        return time.monotonic() - begin

    def kill(self) -> int:
        """Ends the process with SIGKILL; returns its id."""
        assert self._process is not None
        number = self._process.pid
        self._process.kill()
        self._reap()
        return number

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._process is not None:
                self._process.terminate()
                self._reap()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            shutil.rmtree(self.region_dir, ignore_errors=True)

    def _reap(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(10)
        except BaseException:  # too slow, or a second Ctrl-C
            self._process.kill()
            self._process.wait()
            raise
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Lets signals that end the program wait for the end of the block."""
    arrived: list[int] = []
    handlers = {n: signal.signal(n, lambda n, _: arrived.append(n)) for n in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)
