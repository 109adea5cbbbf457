"""Speculative decoding, preemption and reasoning in the real engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.support import ServiceProcess
from tests.vllm.model import build
from tests.vllm.support import SCHEMA, Record, calls, decode, engine, manager, params, valid

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


def test_asynchronous_scheduling(model: Path, service: ServiceProcess) -> None:
    """Off on a CPU unless it is asked for, where the executor has a queue of two steps."""
    with engine(model, service, async_scheduling=True) as llm:
        config = llm.llm_engine.vllm_config.scheduler_config
        if not config.async_scheduling:
            pytest.skip("vLLM's CPU build switches asynchronous scheduling off")
        record = Record(llm)
        assert all(map(valid, decode(llm, [(prompt, params(json=SCHEMA)) for prompt in PROMPTS])))
        assert record.check() > 100


def test_preempted_requests_go_on(model: Path, service: ServiceProcess) -> None:
    # Room for the prompts, not for all that follows them.
    options = {"num_gpu_blocks_override": 14, "block_size": 16, "enable_prefix_caching": False}
    with engine(model, service, **options, max_model_len=200) as llm:
        record = Record(llm)
        wanted = [
            (f"prompt {seed} " * 4, params(seed=seed, json=SCHEMA, tokens=150)) for seed in range(8)
        ]
        for each in decode(llm, wanted):
            assert each.finish_reason == "length" or valid(each)
        name = "vllm:num_preemptions"
        assert sum(metric.value for metric in llm.get_metrics() if metric.name == name) > 0
        assert record.check() > 100


@pytest.mark.parametrize("drafts", [None, NGRAM], ids=["plain", "ngram"])
def test_text_before_the_end_of_thinking_is_free(
    model: Path, service: ServiceProcess, drafts: dict[str, Any] | None
) -> None:
    config = {"reasoning_parser": "qwen3"}
    with engine(model, service, structured_outputs_config=config, speculative_config=drafts) as llm:
        end = llm.get_tokenizer().convert_tokens_to_ids(THOUGHT)
        record = Record(llm)
        wanted = []
        for seed in range(6):
            sampled = params(seed=seed, json=SCHEMA)
            if drafts is None:
                sampled.logit_bias = {end: 4.0}  # about one token in twelve
            else:
                sampled.temperature = 0.0
            # Drafts come from the prompt: the end of thinking is inside a chain of them.
            wanted.append((f'hello {seed} {THOUGHT}{{"name": {THOUGHT}' * 3, sampled))
        found = decode(llm, wanted)
        ended = [each for each in found if end in each.token_ids]
        assert ended
        for each in ended:
            thought, text = each.text.split(THOUGHT, 1)
            assert valid(dataclasses.replace(each, text=text))
        assert record.check() > 10
