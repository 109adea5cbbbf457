"""The service that benchmarks measure, as its own process."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def service() -> Iterator[tuple[str, Path]]:
    """A service as its own process, with shared memory."""
    base = Path(tempfile.mkdtemp(prefix="gs-bench-"))
    shm = Path("/dev/shm")
    region_dir = Path(tempfile.mkdtemp(prefix="gs-bench-", dir=shm if shm.is_dir() else None))
    target = f"unix:{base}/service.sock"
    # In an engine's environment, the variable names that of the service.
    python = os.environ.get("GRAMMAR_SERVICE_PYTHON", sys.executable)
    command = [python, "-m", "grammar_service", "serve", "--listen", target]
    command += ["--region-dir", str(region_dir), "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield target, region_dir
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(base)
        shutil.rmtree(region_dir)
