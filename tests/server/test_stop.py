"""SIGTERM: the service ends within its grace, also with a call that never returns."""

import signal

import psutil

from engine_client import GrammarSpec, Row
from tests.support import ServiceProcess, toy, wait_until

VOCABULARY = toy(["a", "b", "<eos>"], stop=[2])
AMBIGUOUS = GrammarSpec.ebnf('root ::= root root | [ab] | ""', backend="xgrammar")
"""The time of a token grows with the square of those before it."""


def test_a_call_that_never_returns_does_not_outlive_the_grace() -> None:
    service = ServiceProcess("--grace-seconds=1")
    try:
        service.start()
        with service.client(step_timeout=1.0) as client:
            grammar = client.compile(AMBIGUOUS, VOCABULARY)
            result = client.step([Row("endless", grammar, [0, 1] * 20_000)])
            assert result.notes[0].reason == "SERVICE_UNREACHABLE"
            process = psutil.Process(service.pid)
            busy = process.cpu_times().user
            wait_until(lambda: process.cpu_times().user > busy + 0.5)  # it goes on with it
        assert service.terminate(seconds=30) == 1
    finally:
        service.kill()
        service.close()


def test_without_one_it_ends_well() -> None:
    service = ServiceProcess("--grace-seconds=5")
    try:
        service.start()
        service.signal(signal.SIGTERM)
        assert service.terminate(seconds=30) == 0
    finally:
        service.close()
