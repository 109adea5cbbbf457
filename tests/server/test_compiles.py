"""Compiles whose callers go away, and what a compile may cost the service."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import grpc
import psutil
import pytest

from engine_client import Grammar, GrammarClient, GrammarSpec, Refused
from engine_client.wire import grammars_pb2 as grammars
from tests.server import TOKENS, Stubs, stubs_of
from tests.server.test_lifetime import counted
from tests.server.test_many_grammars import free_port
from tests.support import ServiceProcess, running_service, wait_until

pytestmark = pytest.mark.timeout(300)

WAIT = 90
"""Compile children are nice: on a busy machine theirs is the last turn."""
_NUMBERS = count()

# A caller that is killed in the middle of a compile.
CALLER = """
import sys
from engine_client.wire.grammars_pb2 import CompileGrammarRequest
from tests.server import stubs_of
with stubs_of(sys.argv[1]) as stubs:
    request = CompileGrammarRequest.FromString(sys.stdin.buffer.read())
    stubs.grammars.CompileGrammar(request, timeout=600)
"""


def literal(length: int) -> grammars.CompileGrammarRequest:
    """A compile whose time grows with the square of a length; another one each time."""
    spec = grammars.GrammarSpec(
        type=grammars.GRAMMAR_TYPE_EBNF, source=f'root ::= "{"x" * length}{next(_NUMBERS)}"'
    )
    return grammars.CompileGrammarRequest(tokenizer_id=TOKENS.id, spec=spec)


def slow() -> grammars.CompileGrammarRequest:
    """Half a minute at least."""
    return literal(900_000)


def some_choice() -> GrammarSpec:
    """What is compiled at once."""
    return GrammarSpec.choice([f"x{next(_NUMBERS)}"])


class Pool:
    """A service with one compile child, and what it counts."""

    def __init__(self, service: ServiceProcess, port: int, stubs: Stubs) -> None:
        self.service = service
        self.stubs = stubs
        self._port = port

    def compiles(self, result: str) -> float:
        return counted(self._port, f'grammar_compiles_total{{result="{result}"}}')

    def children_ended(self, why: str) -> float:
        return counted(self._port, f'grammar_compile_children_ended_total{{why="{why}"}}')

    def compile(self, spec: GrammarSpec) -> Grammar:
        with GrammarClient(self.service.target, timeout=WAIT) as client:
            return client.compile(spec, TOKENS)

    def child(self) -> psutil.Process:
        """The child, ready and idle."""
        self.compile(some_choice())
        (child,) = psutil.Process(self.service.pid).children()
        return child


@contextmanager
def pool_of(*flags: str) -> Iterator[Pool]:
    """A service with one compile child."""
    port = free_port()
    with (
        running_service("--compile-workers=1", f"--metrics-port={port}", *flags) as service,
        stubs_of(service.target) as stubs,
    ):
        yield Pool(service, port, stubs)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pool_of("--compile-seconds=600", "--compile-queue=3") as made:
        yield made


def works(child: psutil.Process, seconds: float = 0.1) -> Callable[[], bool]:
    """Tells whether a child has worked for some time since now."""
    idle = child.cpu_times().user
    return lambda: bool(child.cpu_times().user >= idle + seconds)


def cancels(pool: Pool, started: Callable[[], bool]) -> None:
    call = pool.stubs.grammars.CompileGrammar.future(slow(), timeout=600)
    wait_until(started, WAIT)
    call.cancel()


def runs_out_of_time(pool: Pool, started: Callable[[], bool]) -> None:
    call = pool.stubs.grammars.CompileGrammar.future(slow(), timeout=8)
    wait_until(started, WAIT)
    assert isinstance(call.exception(), grpc.RpcError)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def hangs_up(pool: Pool, started: Callable[[], bool]) -> None:
    with stubs_of(pool.service.target) as stubs:
        call = stubs.grammars.CompileGrammar.future(slow(), timeout=600)
        wait_until(started, WAIT)
        assert not call.done()


def dies(pool: Pool, started: Callable[[], bool]) -> None:
    command = [sys.executable, "-c", CALLER, pool.service.target]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as caller:
        assert caller.stdin is not None
        caller.stdin.write(slow().SerializeToString())
        caller.stdin.close()
        try:
            wait_until(started, WAIT)
        finally:
            caller.kill()


@pytest.mark.parametrize("caller", [cancels, runs_out_of_time, hangs_up, dies])
def test_a_compile_ends_with_its_caller(
    pool: Pool, caller: Callable[[Pool, Callable[[], bool]], None]
) -> None:
    child = pool.child()
    ended, cancelled = pool.children_ended("cancelled"), pool.compiles("cancelled")
    caller(pool, works(child))
    wait_until(lambda: not child.is_running(), WAIT)
    wait_until(lambda: pool.children_ended("cancelled") == ended + 1)
    assert pool.compiles("cancelled") == cancelled + 1
    # Its place is free.
    assert pool.compile(some_choice()).backend == "xgrammar"


def test_a_compile_goes_on_while_one_caller_waits(pool: Pool) -> None:
    for leaver in (0, 1):
        child = pool.child()
        joined, cancelled = pool.compiles("joined"), pool.compiles("cancelled")
        request, started = literal(120_000), works(child)
        calls = [pool.stubs.grammars.CompileGrammar.future(request, timeout=WAIT)]
        wait_until(started, WAIT)
        calls.append(pool.stubs.grammars.CompileGrammar.future(request, timeout=WAIT))
        wait_until(lambda before=joined: pool.compiles("joined") == before + 1)
        calls.pop(leaver).cancel()
        answer = calls[0].result()
        assert answer.cached == (leaver == 0)
        assert pool.stubs.grammars.CompileGrammar(request, timeout=WAIT).cached
        assert child.is_running()
        assert pool.compiles("cancelled") == cancelled


def test_a_cancelled_compile_is_no_refusal(pool: Pool) -> None:
    request, cached = literal(120_000), pool.compiles("refusal_cached")
    started = works(pool.child())
    call = pool.stubs.grammars.CompileGrammar.future(request, timeout=WAIT)
    wait_until(started, WAIT)
    call.cancel()
    assert not pool.stubs.grammars.CompileGrammar(request, timeout=60).cached
    assert pool.compiles("refusal_cached") == cached


# Starting a child takes longer than most compiles.
def test_hasty_callers_cost_no_children(pool: Pool) -> None:
    def over() -> float:
        return pool.compiles("cancelled") + pool.compiles("compiled")

    child = pool.child()
    cancelled, before = pool.compiles("cancelled"), over()
    for number in range(1, 6):
        started = works(child, 0.01)
        call = pool.stubs.grammars.CompileGrammar.future(literal(12_000), timeout=WAIT)
        wait_until(started, WAIT)
        call.cancel()
        wait_until(lambda n=number: over() == before + n, WAIT)
        assert child.is_running()
    assert pool.compiles("cancelled") > cancelled
    assert pool.child() == child


def test_callers_who_are_gone_take_no_place(pool: Pool) -> None:
    held = some_choice()
    pool.compile(held)

    def is_full() -> bool:
        """Whether even what is held finds no place to be asked for."""
        try:
            return not pool.compile(held).cached
        except Refused as error:
            return error.reason == "COMPILE_QUEUE_FULL"

    calls = [pool.stubs.grammars.CompileGrammar.future(slow(), timeout=600) for _ in range(2)]
    for _ in range(8):
        waiting = pool.stubs.grammars.CompileGrammar.future(slow(), timeout=600)
        wait_until(is_full, WAIT)
        waiting.cancel()
        wait_until(lambda: not is_full(), WAIT)
    for call in calls:
        call.cancel()
    assert pool.compile(some_choice()).backend == "xgrammar"


def test_what_takes_long_to_load_is_refused() -> None:
    words = [f"x{'1' * (number % 10)}{number}" for number in range(40_000)]
    spec = GrammarSpec.choice(words, backend="llguidance")
    with pool_of("--load-seconds=0.1", "--schema-enum=50000") as pool:
        child = pool.child()
        for _ in range(2):  # nor is it remembered, as another machine may be quicker
            with pytest.raises(Refused) as caught:
                pool.compile(spec)
            assert caught.value.reason == "COMPILE_DEADLINE"
            assert "load_seconds" in caught.value.message
        assert pool.compiles("refusal_cached") == 0
        assert pool.compiles("compile_deadline") == 2
        assert pool.child() == child, "nothing was killed"


# xgrammar's cache keeps some of what it evicts.
def test_a_child_that_grows_is_replaced() -> None:
    with pool_of(f"--compile-kept-bytes={24 << 20}") as pool:
        child = pool.child()
        for number in range(1000):
            pool.compile(GrammarSpec.regex(f"x{{{20_000 + number}}}1"))
            if not child.is_running():
                break
        assert pool.children_ended("large") == 1
        assert pool.compile(some_choice()).backend == "xgrammar"
