"""Speculative decoding, preemption and reasoning in the real engine."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.request import Request

from engine_client import Row
from examples.tiny_model import THOUGHT, build
from tests.support import ServiceProcess, wait_until
from tests.vllm.support import (
    CRAMPED,
    SCHEMA,
    Record,
    calls,
    decode,
    engine,
    manager,
    params,
    valid,
)

NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def greedy(**constraint: Any) -> SamplingParams:
    """At temperature 0: vLLM's CPU build samples drafts wrongly above it."""
    sampled = params(tokens=250, **constraint)
    sampled.temperature = 0.0
    return sampled


def accepted(llm: LLM) -> float:
    """Drafts that the engine accepted so far."""
    name = "vllm:spec_decode_num_accepted_tokens"
    return float(sum(metric.value for metric in llm.get_metrics() if metric.name == name))


@pytest.fixture(scope="module", params=["ngram", "draft model"])
def speculative(
    request: pytest.FixtureRequest, model: Path, service: ServiceProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LLM]:  # fmt: skip
    config = dict(NGRAM)
    if request.param == "draft model":
        draft = build(tmp_path_factory.mktemp("draft"), layers=1)
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with engine(model, service, speculative_config=config) as llm:
        yield llm


PROMPTS = ['{"name": "a", "age": 1} {"name": "a", "age": 1}', "hello hello hello", "0 0 0 0"]


def test_drafts_never_break_a_grammar(speculative: LLM) -> None:
    wanted = [(prompt, greedy(json=SCHEMA)) for prompt in PROMPTS]
    wanted += [(prompt, greedy(regex="(ab|cd){2,9}e")) for prompt in PROMPTS]
    wanted += [(PROMPTS[0], greedy())]
    record = Record(speculative)
    before, sent = manager(speculative).steps, calls(speculative)
    found = decode(speculative, wanted)
    assert all(map(valid, found[:3]))
    assert all(each.finish_reason == "stop" for each in found[3:6])
    assert manager(speculative).steps - before == calls(speculative) - sent
    stats = manager(speculative).grammars.client.stats.snapshot()
    assert not stats.get("policy_fail")
    assert accepted(speculative) > 0
    assert record.check() > 100


def test_a_json_object_with_drafts_at_temperature_0(speculative: LLM) -> None:
    """vllm-project/vllm: this run ended in an index error, and the engine with it."""
    for each in decode(speculative, [(prompt, greedy(json_object=True)) for prompt in PROMPTS]):
        assert each.text.startswith("{")
        assert each.finish_reason in ("length", "stop")


def test_the_text_is_that_without_drafts(
    speculative: LLM, model: Path, service: ServiceProcess
) -> None:
    wanted = [(prompt, greedy(json=SCHEMA)) for prompt in PROMPTS]
    with_drafts = [each.text for each in decode(speculative, wanted)]
    with engine(model, service) as plain:
        assert [each.text for each in decode(plain, wanted)] == with_drafts


def forced_asynchronous() -> contextlib.AbstractContextManager[object]:
    """VLLM's CPU platform switches asynchronous scheduling off; this has it stay on."""
    platform = type(current_platform)
    original = platform.check_and_update_config

    def keep(vllm_config: VllmConfig) -> None:
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    return mock.patch.object(platform, "check_and_update_config", staticmethod(keep))


@pytest.mark.parametrize("drafts", [None, "draft model"], ids=["plain", "draft model"])
def test_asynchronous_scheduling(
    model: Path, service: ServiceProcess, tmp_path: Path, drafts: str | None
) -> None:
    config = None
    if drafts is not None:
        draft = build(tmp_path, layers=1)
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with (
        forced_asynchronous(),
        engine(model, service, async_scheduling=True, speculative_config=config) as llm,
    ):
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        assert llm.llm_engine.engine_core.engine_core.batch_queue is not None
        record = Record(llm)
        wanted = [(prompt, greedy(json=SCHEMA)) for prompt in PROMPTS]
        before, sent = manager(llm).steps, calls(llm)
        assert all(map(valid, decode(llm, wanted)))
        assert manager(llm).steps - before == calls(llm) - sent
        assert record.check() > 50


def test_preempted_requests_go_on(model: Path, service: ServiceProcess) -> None:
    # Room for the prompts, not for all that follows them.
    with engine(model, service, **CRAMPED) as llm:
        record = Record(llm)
        wanted = [
            (f"prompt {seed} " * 4, params(seed=seed, json=SCHEMA, tokens=150)) for seed in range(8)
        ]
        for each in decode(llm, wanted):
            assert each.finish_reason == "length" or valid(each)
        name = "vllm:num_preemptions"
        assert sum(metric.value for metric in llm.get_metrics() if metric.name == name) > 0
        assert record.check() > 100


@pytest.fixture(scope="module")
def thinking(model: Path, service: ServiceProcess) -> Iterator[LLM]:
    config = {"reasoning_parser": "qwen3"}
    with engine(model, service, structured_outputs_config=config) as llm:
        yield llm


def test_text_before_the_end_of_thinking_is_free(thinking: LLM) -> None:
    end = thinking.get_tokenizer().convert_tokens_to_ids(THOUGHT)
    record = Record(thinking)
    wanted = []
    for seed in range(6):
        sampled = params(seed=seed, json=SCHEMA)
        sampled.logit_bias = {end: 4.0}  # about one token in twelve
        wanted.append((f"hello {seed}", sampled))
    found = [each for each in decode(thinking, wanted) if end in each.token_ids]
    assert any(each.token_ids.index(end) > 0 for each in found)
    for each in found:
        text = each.text.split(THOUGHT, 1)[1]
        assert valid(dataclasses.replace(each, text=text))
    assert record.check() > 10


def test_thinking_may_end_inside_a_chain_of_drafts(thinking: LLM) -> None:
    """The engine's manager is asked as its scheduler asks it, which no model can be made to do."""
    tokenizer = thinking.get_tokenizer()
    end = tokenizer.convert_tokens_to_ids(THOUGHT)
    before, after = tokenizer.encode("hm")[:1], tokenizer.encode('{"')
    sampled = params(json=SCHEMA)
    sampled.update_from_generation_config({}, tokenizer.eos_token_id)
    request = Request("chain", [1, 2, 3], sampled, None)
    ours = manager(thinking)
    ours.grammar_init(request)
    assert request.structured_output_request is not None
    wait_until(lambda: request.structured_output_request.is_grammar_ready, 30)
    drafts = [*before, end, *after]
    masks = ours.grammar_bitmask({"chain": request}, ["chain"], {"chain": [*drafts, -1]})
    assert masks is not None
    assert len(masks) == len(drafts) + 2
    everything = [(mask == -1).all() for mask in masks]
    # Free up to the end of thinking, then the grammar, and free where the padding begins.
    assert everything == [True] * (len(before) + 1) + [False] * (len(after) + 1) + [True]
    grammar = request.structured_output_request.grammar.row.grammar
    client = ours.grammars.client
    for length in range(len(after) + 1):
        row = Row(f"chain-{length}", grammar, after[:length])
        expected = client.step([row]).mask(0)
        assert torch.equal(torch.from_numpy(masks[len(before) + 1 + length]), expected)
    # The tokens are accepted: what comes after the marker counts, and the next step goes on.
    request.append_output_token_ids(drafts)
    assert ours.accept_tokens(request, drafts)
    following = ours.grammar_bitmask({"chain": request}, ["chain"], {})
    assert following is not None
    (mask,) = following
    assert torch.equal(torch.from_numpy(mask), expected)
