"""What comes and goes: sequences, matchers, grammars, compiles, streams, and the service itself."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine_client import GrammarClient, GrammarSpec, Outcome, Refused, Row
from engine_client.wire import grammars_pb2 as grammars
from engine_client.wire import sequences_pb2 as pb
from tests.server import (
    CLOSE,
    COLON,
    EOS,
    KEY,
    OBJECT,
    ONE,
    OPEN,
    SECONDS,
    TOKENS,
    Refusal,
    grammar_id_of,
    refused,
    step_of,
    stubs_of,
)
from tests.support import ServiceProcess, allowed, running_service, wait_until

NewId = Callable[[], str]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

TEXT = [OPEN, KEY, COLON, ONE, CLOSE]
FOLLOWING = [[OPEN], [KEY], [COLON], [ONE], [CLOSE, ONE], [EOS]]
"""What may come after each number of tokens of the text."""

SLOW = GrammarSpec.ebnf(f'root ::= "{"a" * 900_000}"')
"""Compiles for half a minute: its time grows with the square of its length."""


@pytest.fixture(scope="module")
def cramped() -> Iterator[tuple[ServiceProcess, int]]:
    """A service with room for almost nothing, and the port of its metrics."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--max-sequences=3", "--matcher-cache-bytes=1", "--grammar-cache-bytes=1"]
    flags += ["--compile-workers=1", "--compile-seconds=4", f"--metrics-port={port}"]
    with running_service(*flags) as service:
        yield service, port


def counted(port: int, name: str) -> float:
    """The sum of a metric over its labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def takes_turns(client: GrammarClient, ids: list[str]) -> None:
    """Sequences step to their ends, turn by turn."""
    compiled = client.compile(OBJECT, TOKENS)
    for length, following in enumerate(FOLLOWING):
        for sequence_id in ids:
            row = Row(sequence_id, compiled, TEXT[:length], max(length - 1, 0))
            result = client.step([row])
            assert allowed(result.mask(0)) == following, (sequence_id, length)


def test_idle_sequences_expire_and_come_back(new_id: NewId) -> None:
    with (
        running_service("--idle-seconds=0.2") as service,
        service.client() as client,
        stubs_of(service.target) as stubs,
    ):
        grammar, sequence_id = client.compile(OBJECT, TOKENS), new_id()
        for length in (1, 3):
            result = client.step([Row(sequence_id, grammar, TEXT[:length], length - 1)])
            assert allowed(result.mask(0)) == FOLLOWING[length]
            wait_until(lambda: isinstance(stubs.held(sequence_id), Refusal))
            refusal = stubs.held(sequence_id)
            assert refusal[:2] == ("NOT_FOUND", "UNKNOWN_SEQUENCE")
        assert client.stats.snapshot()["healed_unknown_sequence"] >= 1
        assert client.step([Row(sequence_id, grammar, TEXT, 4)]).outcomes[0] is Outcome.COMPLETE


def test_more_sequences_than_there_is_room_for(
    cramped: tuple[ServiceProcess, int], new_id: NewId
) -> None:
    service, _ = cramped
    with service.client() as client, stubs_of(service.target) as stubs:
        ids = [new_id() for _ in range(5)]
        takes_turns(client, ids)
        assert [isinstance(stubs.held(id_), Refusal) for id_ in ids] == [True] * 2 + [False] * 3
        # All in one step, as well.
        grammar = client.compile(OBJECT, TOKENS)
        result = client.step([Row(id_, grammar, TEXT[:2]) for id_ in ids])
        assert [allowed(mask) for mask in result.masks] == [[COLON]] * 5
        assert client.stats.snapshot()["healed_unknown_sequence"] > 5


def test_matchers_are_rebuilt_as_fast_as_they_are_evicted(
    cramped: tuple[ServiceProcess, int], new_id: NewId
) -> None:
    service, port = cramped
    with service.client() as client, stubs_of(service.target) as stubs:
        before = counted(port, "grammar_matcher_rebuilds_total")
        ids = [new_id() for _ in range(3)]
        takes_turns(client, ids)
        assert "healed_unknown_sequence" not in client.stats.snapshot(), "their histories are held"
        assert counted(port, "grammar_matcher_rebuilds_total") > before
        # A rewind, a draft chain and a fork of a sequence without a matcher.
        grammar = client.compile(OBJECT, TOKENS)
        chain = Row(ids[0], grammar, TEXT[:1], 1, drafts=(KEY, COLON, ONE))
        result = client.step([chain])
        assert [allowed(mask) for mask in result.masks] == FOLLOWING[1:5]
        client.step([Row(ids[1], grammar, TEXT[:3], 3)])
        fork = pb.Fork(source_id=ids[0], target_id=ids[2])
        stubs.sequences.ForkSequences(pb.ForkSequencesRequest(forks=[fork]), timeout=SECONDS)
        assert allowed(client.step([Row(ids[2], grammar, TEXT[:1], 1)]).mask(0)) == [KEY]
        client.close_sequences(ids)


def test_evicted_grammars_are_healed_and_live_ones_stay(
    cramped: tuple[ServiceProcess, int], new_id: NewId
) -> None:
    service, _ = cramped
    with service.client() as client, stubs_of(service.target) as stubs:

        def is_held(grammar_id: str) -> bool:
            request = grammars.GetGrammarRequest(grammar_id=grammar_id)
            try:
                stubs.grammars.GetGrammar(request, timeout=SECONDS)
            except grpc.RpcError:
                return False
            return True

        first, second, third = (
            client.compile(GrammarSpec.choice([text]), TOKENS) for text in ("x1", "x11", "x111")
        )
        assert [is_held(grammar.id) for grammar in (first, second, third)] == [False, False, True]
        sequence_id = new_id()
        assert allowed(client.step([Row(sequence_id, first, [6])]).mask(0)) == [ONE]
        assert client.stats.snapshot()["healed_unknown_grammar"] == 1
        assert not is_held(third.id)
        # The sequence holds its grammar, whatever is compiled beside it.
        client.compile(GrammarSpec.choice(["x1111"]), TOKENS)
        client.compile(GrammarSpec.choice(["x11111"]), TOKENS)
        assert is_held(first.id)
        assert client.step([Row(sequence_id, first, [6, 4], 1)]).outcomes[0] is Outcome.COMPLETE
        assert client.stats.snapshot()["healed_unknown_grammar"] == 1
        # Until it is closed.
        request = pb.CloseSequencesRequest(sequence_ids=[sequence_id])
        stubs.sequences.CloseSequences(request, timeout=SECONDS)
        client.compile(GrammarSpec.choice(["x111111"]), TOKENS)
        assert not is_held(first.id)


def test_equal_compiles_at_once_are_one(cramped: tuple[ServiceProcess, int]) -> None:
    service, start = cramped[0], threading.Barrier(4)
    spec = GrammarSpec.ebnf(f'root ::= "{"x" * 60_000}"')

    def compile_it(_: int) -> tuple[str, bool, float]:
        with service.client() as client:
            client.register_tokenizer(TOKENS)
            start.wait(SECONDS)
            grammar = client.compile(spec, TOKENS)
            return grammar.id, grammar.cached, grammar.compile_ms

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(compile_it, range(4)))
    assert len({(grammar_id, compile_ms) for grammar_id, _, compile_ms in answers}) == 1
    assert sorted(cached for _, cached, _ in answers) == [False, True, True, True]


def test_a_compile_that_takes_too_long(cramped: tuple[ServiceProcess, int], new_id: NewId) -> None:
    service, _ = cramped
    with service.client() as client, stubs_of(service.target) as stubs:
        grammar, sequence_id = client.compile(OBJECT, TOKENS), new_id()
        client.step([Row(sequence_id, grammar, [])])
        spec = grammars.GrammarSpec(type=grammars.GRAMMAR_TYPE_EBNF, source=SLOW.source)
        request = grammars.CompileGrammarRequest(tokenizer_id=TOKENS.id, spec=spec)
        slowest, steps = 0.0, 0
        running = stubs.grammars.CompileGrammar.future(request, timeout=SECONDS)
        while not running.done():
            started = time.monotonic()
            length = steps % len(TEXT)
            result = client.step([Row(sequence_id, grammar, TEXT[:length])])
            assert allowed(result.mask(0)) == FOLLOWING[length]
            slowest, steps = max(slowest, time.monotonic() - started), steps + 1
        refusal = refused(running.result)
        assert refusal[:2] == ("DEADLINE_EXCEEDED", "COMPILE_DEADLINE")
        assert "compile_seconds" in refusal.message
        assert steps > 20
        assert slowest < 2, "a step waited for the compile"
        # The next compile has a child of its own, and nothing remembers the deadline as an answer.
        assert client.compile(GrammarSpec.choice(["xx"]), TOKENS).backend == "xgrammar"


def test_a_compile_child_that_is_killed(cramped: tuple[ServiceProcess, int]) -> None:
    service, _ = cramped
    with service.client() as client, stubs_of(service.target) as stubs:
        client.compile(GrammarSpec.choice(["xx1"]), TOKENS)
        # In the middle of a compile.
        spec = grammars.GrammarSpec(type=grammars.GRAMMAR_TYPE_EBNF, source=SLOW.source + " ")
        request = grammars.CompileGrammarRequest(tokenizer_id=TOKENS.id, spec=spec)
        child = compile_child(service)
        idle = child.cpu_times().user
        running = stubs.grammars.CompileGrammar.future(request, timeout=SECONDS)
        wait_until(lambda: child.cpu_times().user > idle + 0.1, SECONDS)
        child.kill()
        refusal = refused(running.result)
        assert refusal[:2] == ("INTERNAL", "COMPILE_CRASHED")
        assert "child process" in refusal.message
        assert not client.compile(GrammarSpec.choice(["xx11"]), TOKENS).cached
        # Between two compiles, the next one may find its child dead, and the one after that not.
        compile_child(service).kill()
        reason = ""
        try:
            client.compile(GrammarSpec.choice(["xx111"]), TOKENS)
        except Refused as error:
            reason = error.reason
        assert reason in ("", "COMPILE_CRASHED")
        assert not client.compile(GrammarSpec.choice(["xx1111"]), TOKENS).cached


def compile_child(service: ServiceProcess) -> psutil.Process:
    """The one child of a service with one worker."""
    (child,) = psutil.Process(service.pid).children()
    return child


def test_two_streams_step_one_sequence_at_once(service: ServiceProcess, new_id: NewId) -> None:
    ids = [new_id() for _ in range(4)]
    start = threading.Barrier(2)

    def rank(_: int) -> list[list[list[int]]]:
        seen = []
        with service.client() as client:
            grammar = client.compile(OBJECT, TOKENS)
            for turn in range(10):
                for length in range(len(FOLLOWING)):
                    start.wait(SECONDS)
                    rows = [Row(f"{id_}-{turn}", grammar, TEXT[:length]) for id_ in ids]
                    seen.append([allowed(mask) for mask in client.step(rows).masks])
        return seen

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(rank, range(2))
    assert one == other == [[following] * 4 for following in FOLLOWING] * 10


def test_sigterm_ends_idle_streams_and_turns_health_around(new_id: NewId) -> None:
    with (
        running_service() as service,
        service.client() as client,
        stubs_of(service.target) as stubs,
        grpc.insecure_channel(service.target) as channel,
        stubs.stream() as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        request = health_pb2.HealthCheckRequest()
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=SECONDS)
        assert next(watch).status == SERVING
        stream.step(step_of(new_id(), grammar_id=grammar_id_of(client)))
        started = time.monotonic()
        terminated = pool.submit(service.terminate)
        assert next(watch).status == NOT_SERVING

        def is_over() -> bool:
            try:
                stream.ask(pb.StepRequest())
            except grpc.RpcError as error:
                return error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
            return False

        wait_until(is_over)
        assert terminated.result() == 0
        assert time.monotonic() - started < 5, "it waited for somebody who only watches"


def test_sigterm_in_the_middle_of_steps_and_a_new_service(new_id: NewId) -> None:
    with running_service() as service:
        stop, counts = threading.Event(), [0, 0, 0]

        def engine(number: int) -> None:
            with service.client(shared=number > 0, step_timeout=60) as client:
                grammar = client.compile(OBJECT, TOKENS)
                while not stop.is_set():
                    sequence_id = new_id()
                    for length, following in enumerate(FOLLOWING):
                        row = Row(sequence_id, grammar, TEXT[:length], max(length - 1, 0))
                        result = client.step([row])
                        assert allowed(result.mask(0)) == following
                        assert result.outcomes[0] is not Outcome.FAILED
                        counts[number] += 1

        with ThreadPoolExecutor(3) as pool:
            engines = [pool.submit(engine, number) for number in range(3)]
            try:
                wait_until(lambda: min(counts) > 20 or any(e.done() for e in engines), SECONDS)
                started = time.monotonic()
                assert service.terminate() == 0
                assert time.monotonic() - started < 5
                service.start()
                counts[:] = [0, 0, 0]
                wait_until(lambda: min(counts) > 20 or any(e.done() for e in engines), 60)
            finally:
                stop.set()
            for each in engines:
                each.result(SECONDS)


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    """A service that isn't expected to run."""
    command = [sys.executable, "-m", "grammar_service", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_second_service_on_the_same_socket(service: ServiceProcess, tmp_path: Path) -> None:
    run = serve("--listen", service.target)
    assert (run.returncode, run.stdout) == (1, "")
    assert "another process listens on" in run.stderr
    assert "Traceback" not in run.stderr
    with service.client() as client:
        client.register_tokenizer(TOKENS)  # the first one still serves
    # What is no socket at all is left alone.
    path = tmp_path / "file"
    path.write_text("mine")
    run = serve("--listen", f"unix:{path}")
    assert run.returncode == 1
    assert "is no socket" in run.stderr
    assert path.read_text() == "mine"


def test_a_killed_service_leaves_nothing_in_the_way() -> None:
    with running_service("--compile-workers=1") as service, service.client() as client:
        client.compile(OBJECT, TOKENS)
        child = compile_child(service)
        service.kill()
        assert Path(service.target.removeprefix("unix:")).exists()
        wait_until(lambda: not child.is_running())
        service.start()
        client.register_tokenizer(TOKENS)


def test_reflection_and_health_answer(service: ServiceProcess) -> None:
    with grpc.insecure_channel(service.target) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        (listed,) = stub.ServerReflectionInfo(iter([request]), timeout=SECONDS)
        names = {service.name for service in listed.list_services_response.service}
        ours = {f"grammar.v1.{name}Service" for name in ("Tokenizer", "Grammar", "Sequence")}
        assert names >= {*ours, "grpc.health.v1.Health"}
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", *ours):
            request = health_pb2.HealthCheckRequest(service=name)
            assert check(request, timeout=SECONDS).status == SERVING


def test_settings_by_flag_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag wins over the environment, that over the file, and that over the default."""
    config = tmp_path / "service.toml"
    config.write_text("max_drafts = 1\nmax_rows = 1\nmax_streams = 1\n")
    monkeypatch.setenv("GRAMMAR_SERVICE_MAX_ROWS", "2")
    monkeypatch.setenv("GRAMMAR_SERVICE_MAX_STREAMS", "2")
    with (
        running_service(f"--config={config}", "--max-streams=3") as service,
        stubs_of(service.target) as stubs,
    ):
        many = pb.StepRequest(rows=[0, 1, 2], positions=[0, 0, 0])
        long = pb.StepRequest(rows=[0], positions=[0], draft_counts=[2], drafts=[KEY, KEY])
        for step, says in ((many, "at most 2 (max_rows)"), (long, "at most 1 drafts")):
            answer = stubs.unary(step)
            assert isinstance(answer, Refusal)
            assert answer.reason == "STEP_TOO_LARGE"
            assert says in answer.message
        with stubs.stream() as one, stubs.stream() as two, stubs.stream() as three:
            for stream in (one, two, three):
                stream.step(pb.StepRequest())
            with stubs.stream() as fourth:
                refusal = refused(lambda: fourth.ask(pb.StepRequest()))
                assert refusal[:2] == ("RESOURCE_EXHAUSTED", "TOO_MANY_STREAMS")
                assert "3 streams" in refusal.message
