"""The client against a service that is slow, frozen, gone, restarted or out of its mind."""

import signal
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from engine_client import Grammar, GrammarClient, GrammarSpec, Outcome, Policy, Row, Unreachable
from engine_client.wire import sequences_pb2 as pb
from engine_client.wire.sequences_pb2_grpc import (
    SequenceServiceServicer,
    add_SequenceServiceServicer_to_server,
)
from tests.engine_client.test_client import SPEC, VOCABULARY
from tests.support import allowed, running_service, toy, wait_until

EVERYTHING = list(range(8))


@pytest.fixture
def grammar(client: GrammarClient) -> Grammar:
    return client.compile(SPEC, VOCABULARY)


def policies(
    client: GrammarClient, grammar: Grammar, name: str
) -> dict[Policy, tuple[object, ...]]:
    """What a step gives under each policy, with the service gone."""
    rows = [
        Row(f"{name}-{policy.value}", grammar, [0, 2], 1, [3, 6], policy=policy)
        for policy in Policy
    ]
    result = client.step(rows)
    return {
        policy: (
            result.outcomes[index],
            result.notes[index].reason,
            result.legal_drafts[index],
            [allowed(result.masks[result.mask_rows[index] + i]) for i in range(3)],
        )
        for index, policy in enumerate(Policy)
    }


GONE = {
    Policy.FAIL: (Outcome.FAILED, "SERVICE_UNREACHABLE", 0, [[7], [7], [7]]),
    Policy.IN_PROCESS: (Outcome.OK, "IN_PROCESS", 1, [[3], [4], [4]]),
    Policy.UNCONSTRAINED: (Outcome.OK, "UNCONSTRAINED", 2, [EVERYTHING] * 3),
}


def test_a_service_that_is_gone_a_row_goes_by_its_policy() -> None:
    with running_service() as service:
        client = service.client(step_timeout=0.5, policy=Policy.IN_PROCESS, cool_down=60)
        grammar = client.compile(SPEC, VOCABULARY)
        assert client.step([Row("before", grammar, [0])]).outcomes == [Outcome.OK]
        service.kill()
        started = time.monotonic()
        assert policies(client, grammar, "gone") == GONE
        assert time.monotonic() - started < 5
        # From now on steps aren't even sent, so that the engine isn't held at each of them.
        assert policies(client, grammar, "still") == GONE
        counts = client.stats.snapshot()
        assert counts["timeouts"] == 1
        assert counts["skipped"] == 1
        assert counts["policy_in_process"] == 2
        assert client.fork("before", ["after"]) is False
        client.close_sequences(["before"])
        with pytest.raises(Unreachable):
            GrammarClient(service.target, timeout=0.3).compile(SPEC, VOCABULARY)
        client.close()


def test_a_frozen_service_is_met_by_the_deadline_and_is_used_again_after_it() -> None:
    with running_service() as service:
        client = service.client(step_timeout=0.5, cool_down=0)
        grammar = client.compile(SPEC, VOCABULARY)
        before = client.step([Row("frozen", grammar, [0])])
        assert allowed(before.mask(0)) == [2]
        service.freeze()
        try:
            in_flight = client.submit([Row("frozen", grammar, [0, 2], 1)])
            late = client.collect(in_flight)
            assert late.outcomes == [Outcome.FAILED]
            assert allowed(late.mask(0)) == [7]
        finally:
            service.signal(signal.SIGCONT)
        # What the thawed service writes late goes to a region that nobody reads.
        for _ in range(20):
            after = client.step([Row("frozen", grammar, [0, 2], 1)])
            if after.outcomes == [Outcome.OK]:
                break
        assert allowed(after.mask(0)) == [3]
        assert allowed(late.mask(0)) == [7]
        assert client.stats.snapshot()["regions_abandoned"] >= 1
        client.close()


def test_a_rewind_that_the_service_never_saw_is_not_counted_on() -> None:
    """The position counts on the step before; where that one was lost, all tokens are sent."""
    tokens = toy(["a", "b", "c", "x", "y", "<eos>"], stop=[5])
    with running_service() as service, service.client(step_timeout=0.5, cool_down=1) as client:
        grammar = client.compile(GrammarSpec.regex("ac{4}x|bc{4}y"), tokens)
        client.step([Row("lost", grammar, [0, 2, 2])])
        service.freeze()
        try:
            assert client.step([Row("lost", grammar, [0, 2, 2], 3)]).outcomes == [Outcome.FAILED]
            assert client.step([Row("lost", grammar, [1, 2, 2])]).outcomes == [Outcome.FAILED]
        finally:
            service.signal(signal.SIGCONT)
        wait_until(lambda: client.step([Row("other", grammar, [])]).outcomes == [Outcome.OK])
        client.step([Row("lost", grammar, [1, 2, 2, 2], 3)])
        result = client.step([Row("lost", grammar, [1, 2, 2, 2, 2], 4)])
        assert allowed(result.mask(0)) == [4]
        assert client.stats.snapshot()["skipped"] >= 1


def test_a_restarted_service_is_healed_within_a_step() -> None:
    with running_service() as service:
        client = service.client(step_timeout=60)
        grammar = client.compile(SPEC, VOCABULARY)
        client.step([Row("restart", grammar, [0])])
        service.kill()
        service.launch()
        result = client.step([Row("restart", grammar, [0, 2], 1)])
        assert allowed(result.mask(0)) == [3]
        counts = client.stats.snapshot()
        assert counts["connects"] == 2
        assert counts["healed_unknown_grammar"] == 1
        assert "regions_given_up" not in counts
        service.wait_ready()
        client.close()


class Nonsense(SequenceServiceServicer):
    """A peer that speaks the protocol and makes no sense."""

    def __init__(self, answers: list[pb.StepStreamResponse]) -> None:
        self._answers = answers

    def StepStream(
        self, request_iterator: Iterator[pb.StepStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepStreamResponse]:
        for _ in request_iterator:
            yield from self._answers


def _answer(step: int = 1, **fields: object) -> pb.StepStreamResponse:
    return pb.StepStreamResponse(step=step, response=pb.StepResponse(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answers",
    [
        [_answer(outcomes=[])],
        [_answer(outcomes=[1, 1], masks=bytes(16))],
        [_answer(outcomes=[77], masks=bytes(8))],
        [_answer(outcomes=[1], masks=bytes(3))],
        [_answer(outcomes=[1], legal_drafts=[1, 2, 3], masks=bytes(8))],
        [_answer(outcomes=[1], notes=[pb.RowNote(index=9)], masks=bytes(8))],
        [_answer(step=5, outcomes=[1], masks=bytes(8))],
        [pb.StepStreamResponse(step=1)],
        [_answer(outcomes=[5])] * 50,
        [],
    ],
    ids=["none", "many", "outcome", "masks", "drafts", "note", "step", "empty", "gaps", "silence"],
)
def test_an_answer_that_makes_no_sense_reaches_no_engine(
    grammar: Grammar, tmp_path: Path, answers: list[pb.StepStreamResponse]
) -> None:
    target = f"unix:{tmp_path}/nonsense.sock"
    server = grpc.server(futures.ThreadPoolExecutor(40))
    add_SequenceServiceServicer_to_server(Nonsense(answers), server)  # type: ignore[abstract]
    server.add_insecure_port(target)
    server.start()
    try:
        with GrammarClient(target, step_timeout=1, cool_down=0) as client:
            for _ in range(2):
                result = client.step([Row("mad", grammar, [0])])
                assert result.outcomes == [Outcome.FAILED]
                assert allowed(result.mask(0)) == [7]
    finally:
        server.stop(None).wait()
