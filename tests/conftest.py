"""Fixtures. Services are real processes; the shared one is for tests that leave no trace."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from engine_client import GrammarClient
from tests.support import ServiceProcess, running_service

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def service() -> Iterator[ServiceProcess]:
    """A service with default settings, shared by all tests: use sequence ids of your own."""
    with running_service("--max-tokenizers", "200") as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[GrammarClient]:
    """A client of the shared service, masks in shared memory."""
    with service.client() as connected:
        yield connected


@pytest.fixture
def new_id() -> Callable[[], str]:
    """Makes sequence ids that no other test has."""
    return lambda: f"sequence-{next(_NUMBERS)}"
