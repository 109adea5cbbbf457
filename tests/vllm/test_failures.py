"""The service killed, gone, frozen or hung, under an engine in full swing: it always goes on."""

from pathlib import Path
from unittest import mock

import pytest
from vllm import LLM

from engine_client.vllm.validation import Validation
from tests.support import ServiceProcess, running_service, wait_until
from tests.vllm.support import SCHEMA, Record, decode, engine, manager, params, texts, valid

EIGHT = [(f"prompt {seed}", params(seed=seed, json=SCHEMA)) for seed in range(8)]
FREE = ("free", params(tokens=30))
QUICK = {"step_timeout": "0.5", "cool_down": "0.2", "timeout": "20"}


def serves(llm: LLM) -> bool:
    """Whether the engine takes the next request."""
    return texts(llm.generate(["hello"], params(tokens=3))) != []


def test_a_service_killed_and_restarted_in_the_middle_is_not_noticed(model: Path) -> None:
    patient = {"step_timeout": "60"}  # a restart takes seconds on a busy machine
    with running_service() as service, engine(model, service, patient) as llm:
        record = Record(llm)
        due = [12, 5]  # steps with masks; a step of the engine may have none

        def disturb(step: int) -> None:
            if due and step == due[-1]:
                due.pop()
                service.kill()
                service.start()

        assert all(map(valid, decode(llm, EIGHT, disturb)))
        assert manager(llm).grammars.client.stats.snapshot()["healed_unknown_grammar"] > 0
        assert record.check() > 100


def test_a_service_gone_for_good_fails_its_requests_and_no_others(model: Path) -> None:
    with running_service() as service, engine(model, service, QUICK) as llm:

        def kill(step: int) -> None:
            if step == 5:
                service.kill()  # a second time does nothing

        *constrained, free = decode(llm, [*EIGHT, FREE], kill)
        assert {each.finish_reason for each in constrained} == {"error"}
        assert len(free.token_ids) == 30 or free.finish_reason == "stop"
        assert serves(llm)
        # What is asked for meanwhile ends too, and what comes after the service is back is served.
        (late,) = decode(llm, EIGHT[:1])
        assert late.finish_reason == "error"
        service.start()
        wait_until(lambda: decode(llm, EIGHT[:1])[0].finish_reason == "stop", 20)


@pytest.mark.parametrize("policy", ["in_process", "unconstrained"])
def test_a_service_gone_for_good_goes_by_the_policy(model: Path, policy: str) -> None:
    settings = QUICK | {"policy": policy}
    with running_service() as service, engine(model, service, settings) as llm:
        decode(llm, EIGHT[:1])

        def kill(step: int) -> None:
            if step == 5:
                service.kill()  # a second time does nothing

        found = decode(llm, EIGHT, kill)
        assert "error" not in {each.finish_reason for each in found}
        if policy == "in_process":
            assert all(map(valid, found))
        assert manager(llm).grammars.client.stats.snapshot()[f"policy_{policy}"] > 0


def test_a_frozen_service_costs_the_deadline_once(model: Path) -> None:
    with running_service() as service, engine(model, service, QUICK | {"cool_down": "30"}) as llm:
        decode(llm, EIGHT[:1])
        frozen: list[int] = []

        def freeze(step: int) -> None:
            if step == 5 and not frozen:
                service.freeze()
                frozen.append(step)

        *constrained, free = decode(llm, [*EIGHT, FREE], freeze)
        assert {each.finish_reason for each in constrained} == {"error"}
        assert free.finish_reason in ("length", "stop")
        stats = manager(llm).grammars.client.stats.snapshot()
        assert stats["timeouts"] == 1
        assert serves(llm)


def test_a_schema_that_hangs_the_compiler_holds_nobody_up(model: Path) -> None:
    hard = params(json={"enum": ["x"]}, tokens=5)
    assert hard.structured_outputs is not None
    hard.structured_outputs.json = None
    hard.structured_outputs.regex = "(" * 40 + "a{1,50}" + "){1,50}" * 40
    with running_service("--compile-seconds=3") as service, engine(model, service) as llm:
        slow, *quick = decode(llm, [("x", hard), *EIGHT[:3], FREE])
        assert slow.finish_reason == "error"
        assert all(map(valid, quick[:3]))
        assert serves(llm)


def test_bad_requests_among_good_ones(model: Path, service: ServiceProcess) -> None:
    """What gets past validation, as when the service is slow, ends alone."""
    with (
        mock.patch.object(Validation, "check", return_value=None),
        engine(model, service) as llm,
    ):
        bad = [
            (f"bad {i}", params(json={"type": "array", "uniqueItems": True, "maxItems": i}))
            for i in range(50)
        ]
        mixed = [request for pair in zip(bad, EIGHT * 7, strict=False) for request in pair]
        found = decode(llm, mixed)
        assert {each.finish_reason for each in found[::2]} == {"error"}
        assert all(map(valid, found[1::2]))
        assert serves(llm)
