"""Grammars without end: many small ones through one service, and a storm of killed compiles.

GRAMMAR_TEST_SCHEMAS is how many schemas: 100,000 for the long form.
"""

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from engine_client import Grammar, GrammarClient, GrammarSpec, Outcome, Refused, Row, ServiceError
from tests.server import CLOSE, COLON, EOS, KEY, OBJECT, ONE, OPEN, TOKENS, stubs_of
from tests.server.test_lifetime import counted
from tests.support import ServiceProcess, allowed, running_service, wait_until

MIB = 1 << 20
SCHEMAS = int(os.environ.get("GRAMMAR_TEST_SCHEMAS", "2000"))
CLIENTS = 4
WORKERS = 2
HOT_EVERY = 50
CACHE_BYTES = 16 * MIB
"""Room for more grammars than HOT_EVERY, and for far fewer than SCHEMAS."""
KEPT_BYTES = 64 * MIB
"""What a compile child may keep; the long form meets it several times."""
HOT = GrammarSpec.json_schema({"type": "object", "properties": {"hot": {"type": "null"}}})
TEXT = [OPEN, KEY, COLON, ONE, CLOSE]
FOLLOWING = [[OPEN], [KEY], [COLON], [ONE], [CLOSE, ONE], [EOS]]
"""What may come after each number of tokens of the text."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def crowded() -> Iterator[tuple[ServiceProcess, int]]:
    """A service with a small cache, and the port of its metrics."""
    port = free_port()
    flags = [f"--grammar-cache-bytes={CACHE_BYTES}", f"--compile-workers={WORKERS}"]
    # The long form takes longer than a sequence may be idle.
    flags += [f"--compile-kept-bytes={KEPT_BYTES}", "--idle-seconds=86400"]
    with running_service(*flags, f"--metrics-port={port}") as service:
        yield service, port


def small(number: int) -> GrammarSpec:
    """One of as many small specs as there are numbers; some go to another backend."""
    if number % 10 == 9:
        return GrammarSpec.regex(f"ab{{{number % 1000}}}c|x{number}")
    kinds = ("integer", "string", "boolean", "null")
    properties = {f"a{number}": {"type": kinds[number % 4]}, "n": {"maximum": number}}
    return GrammarSpec.json_schema({"type": "object", "properties": properties})


def resident(service: ServiceProcess) -> tuple[int, int]:
    """Resident bytes of the service, and of its compile children."""
    process = psutil.Process(service.pid)
    return process.memory_info().rss, sum(c.memory_info().rss for c in process.children())


def assert_steps(client: GrammarClient, grammar: Grammar, sequence_id: str, number: int) -> None:
    """A step of a sequence that takes its text again and again has the right mask."""
    length = number % len(FOLLOWING)
    result = client.step([Row(sequence_id, grammar, TEXT[:length])])
    outcome = Outcome.COMPLETE if length == len(TEXT) else Outcome.OK
    assert result.outcomes[0] is outcome, (number, result.notes)
    assert allowed(result.mask(0)) == FOLLOWING[length]


@pytest.mark.timeout(60 + SCHEMAS // 10)
def test_many_schemas(crowded: tuple[ServiceProcess, int], new_id: Callable[[], str]) -> None:
    service, port = crowded

    def compiles(client: GrammarClient, numbers: Iterator[int]) -> list[bool]:
        """Compiles what comes; tells whether the hot one was held each time."""
        hot = []
        for number in numbers:
            assert not client.compile(small(number), TOKENS).cached
            if number % HOT_EVERY == 0:
                hot.append(client.compile(HOT, TOKENS).cached)
        return hot

    with service.client() as client, ThreadPoolExecutor(CLIENTS) as pool:
        client.compile(HOT, TOKENS)
        # Of all that come and go, a live sequence keeps its own.
        live, grammar = new_id(), client.compile(OBJECT, TOKENS)
        assert_steps(client, grammar, live, 0)
        sizes = [resident(service)]
        for first in (0, SCHEMAS // 2):
            # One for all threads: the interpreter lets them take turns at it.
            numbers = iter(range(first, first + SCHEMAS // 2))
            running = [pool.submit(compiles, client, numbers) for _ in range(CLIENTS)]
            answers = [each.result() for each in running]
            asked = [cached for answer in answers for cached in answer]
            assert len(asked) >= SCHEMAS // 2 // HOT_EVERY > 0
            assert all(asked), "the hot schema is compiled again"
            sizes.append(resident(service))
            assert_steps(client, grammar, live, first)
        assert client.compile(OBJECT, TOKENS).cached
        assert "healed_unknown_grammar" not in client.stats.snapshot()
        client.close_sequences([live])
    assert counted(port, "grammar_grammar_bytes") <= CACHE_BYTES
    if SCHEMAS >= 500:
        assert counted(port, "grammar_grammar_evictions_total") > SCHEMAS / 2
    (before, children), (half, _), (whole, children_whole) = sizes
    assert whole - before < CACHE_BYTES + 64 * MIB
    assert whole - half < 24 * MIB, "the service grows"
    # What it takes to start one, and a compile.
    assert children_whole < max(children, WORKERS * 300 * MIB) + WORKERS * (KEPT_BYTES + 64 * MIB)


def test_refusals_are_kept_and_bounded(crowded: tuple[ServiceProcess, int]) -> None:
    service, port = crowded

    def spec(number: int) -> GrammarSpec:
        name = f"{number:04}" + "x" * 500
        return GrammarSpec.json_schema({"properties": {name: {"uniqueItems": True}}})

    with service.client() as client, ThreadPoolExecutor(CLIENTS) as pool:
        client.register_tokenizer(TOKENS)

        def refuse(number: int) -> None:
            with pytest.raises(Refused) as caught:
                client.compile(spec(number), TOKENS)
            assert caught.value.reason == "SPEC_UNENFORCED"
            assert caught.value.unenforced[0].pointer.startswith(f"/properties/{number:04}")

        def cached() -> float:
            return counted(port, 'grammar_compiles_total{result="refusal_cached"}')

        before = cached()
        for _ in range(3):
            refuse(0)
        assert cached() == before + 2
        # 4 MiB of them are kept.
        list(pool.map(refuse, range(1, 4001)))
        before = cached()
        refuse(4000)
        assert cached() == before + 1
        refuse(0)
        assert cached() == before + 1, "the first is still there, so nothing bounds them"


def test_a_refusal_keeps_nothing_of_its_schema(crowded: tuple[ServiceProcess, int]) -> None:
    service, _ = crowded
    numbers = itertools.count()
    with service.client() as client:

        def refuse(count: int) -> None:
            for number in itertools.islice(numbers, count):
                many = {"enum": [f"value {i} of {number}" for i in range(10_000)]}
                schema = {"properties": {"many": many, "last": {"uniqueItems": True}}}
                with pytest.raises(Refused) as caught:
                    client.compile(GrammarSpec.json_schema(schema), TOKENS)
                assert caught.value.unenforced == (("/properties/last", "uniqueItems"),)

        refuse(5)
        before, _ = resident(service)
        refuse(30)
        assert resident(service)[0] - before < 32 * MIB, "MBs for a refusal of some hundred bytes"


def test_a_storm_of_killed_compiles(new_id: Callable[[], str]) -> None:
    port, over = free_port(), threading.Event()
    numbers = itertools.count(20)

    def storm(client: GrammarClient) -> int:
        """Has compiles killed, one after the other."""
        count = 0
        while not over.is_set():
            # Twice the states for each number.
            slow = GrammarSpec.regex(f"(x|1)*x(x|1){{{next(numbers)}}}", backend="outlines")
            with pytest.raises(Refused) as caught:
                client.compile(slow, TOKENS)
            assert caught.value.reason == "COMPILE_DEADLINE"
            count += 1
        return count

    flags = ["--compile-workers=1", f"--metrics-port={port}"]
    with (
        running_service(*flags, "--compile-seconds=0.3") as service,
        service.client(step_timeout=5) as client,
        service.client() as stormy,
        stubs_of(service.target) as stubs,
        ThreadPoolExecutor(2) as pool,
    ):

        def compiled(spec: GrammarSpec) -> Grammar:
            """The grammar, when a child is ready within the short deadline."""
            found: list[Grammar] = []

            def tries() -> bool:
                try:
                    found.append(client.compile(spec, TOKENS))
                except ServiceError:
                    return False
                return True

            wait_until(tries, 60)
            return found[0]

        grammar, ids = compiled(OBJECT), [new_id() for _ in range(3)]
        storms = [pool.submit(storm, stormy) for _ in range(2)]
        steps = 0
        try:
            while steps < 300 or counted(port, "grammar_compile_children_ended_total") < 4:
                for _ in range(50):
                    assert_steps(client, grammar, ids[steps % 3], steps // 3)
                    steps += 1
                assert not any(running.done() for running in storms), "the storm is over"
        finally:
            over.set()
        kills = sum(running.result(60) for running in storms)
        assert kills >= 4
        # Each is 0.3 s at least, in which a step that waits for it would be the only one.
        assert steps > 10 * kills
        timeouts = {name: n for name, n in client.stats.snapshot().items() if "timeout" in name}
        assert not any(timeouts.values())
        assert not compiled(GrammarSpec.choice(["x", "xx"])).cached
        assert compiled(OBJECT).cached
        for length in range(len(FOLLOWING)):
            assert_steps(client, grammar, ids[0], length)
        assert stubs.held(ids[0]) == TEXT
