"""Tests in the real vLLM, in an environment of its own: `make test-vllm`.

The service is a process of the other environment, as a sidecar is of another image:
GRAMMAR_SERVICE_PYTHON names its interpreter.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ServiceProcess, running_service

# `make test` has no vLLM, and `make test-vllm` runs these.
collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []

os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # EngineCore in this process, where a test can look at it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
)


@pytest.fixture(scope="session")
def service() -> Iterator[ServiceProcess]:
    """A service that no test harms."""
    with running_service(metrics=True) as process:
        yield process


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model."""
    from examples.tiny_model import build

    return build(tmp_path_factory.mktemp("model"))
