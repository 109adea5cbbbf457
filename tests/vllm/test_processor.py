"""The logits processor: in the older runner's engine, and by the newer runner's interface."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState

from engine_client import GrammarSpec, Vocabulary
from engine_client.vllm.processor import GrammarLogitsProcessor
from examples.tiny_model import VOCABULARY
from tests.support import ServiceProcess, running_service, wait_until
from tests.vllm.support import CRAMPED, SCHEMA, decode, engine, environment, params, texts, valid

NAMED = ["engine_client.vllm.processor:GrammarLogitsProcessor"]


def asking(seed: int = 0, tokens: int = 300, **grammar: Any) -> SamplingParams:
    """A request that names its grammar to the processor."""
    sampled = params(tokens=tokens, seed=seed)
    sampled.extra_args = {"grammar": grammar}
    return sampled


@pytest.fixture(scope="module")
def llm(model: Path, service: ServiceProcess) -> Iterator[LLM]:
    with engine(model, service) as made:
        yield made


def processor(llm: LLM) -> GrammarLogitsProcessor:
    """The one that the engine's worker made from the entry point."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    found = worker.model_runner.input_batch.logitsprocs.non_argmax_invariant
    (ours,) = [each for each in found if isinstance(each, GrammarLogitsProcessor)]
    return ours


def test_sixteen_at_once_in_one_call_a_step(llm: LLM, service: ServiceProcess) -> None:
    wanted = [
        ("free", params(tokens=30)),
        *[(f"schema {seed}", asking(seed, json_schema=SCHEMA)) for seed in range(7)],
        *[(f"regex {seed}", asking(seed, regex="[a-c]{5,9}")) for seed in range(7)],
        ("native", params(json=SCHEMA)),
    ]
    found = decode(llm, wanted)
    assert all(map(valid, found[1:8]))
    assert all(5 <= len(each.text) <= 9 and set(each.text) <= set("abc") for each in found[8:15])
    assert valid(found[15])
    longest = max(len(each.token_ids) for each in found[1:15])
    client = processor(llm)._grammars.client  # type: ignore[union-attr]
    assert client.stats.snapshot()["steps"] <= longest + 2
    decode(llm, [("next", params(tokens=1))])  # lets go of the last batch
    wait_until(lambda: service.counted("grammar_sequences") == 0)


def test_by_id_and_with_options(llm: LLM, model: Path, service: ServiceProcess) -> None:
    with service.client() as client:
        grammar = client.compile(
            GrammarSpec.regex("(by|an) id"), Vocabulary.from_path(model, width=VOCABULARY)
        )
    compact = asking(json_schema=SCHEMA, max_whitespace=0, backend="llguidance")
    by_id, schema = texts(llm.generate(["x", "x"], [asking(id=grammar.id), compact]))
    assert by_id in ("by id", "an id")
    assert " " not in schema.replace(json.loads(schema)["name"], "")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ({"regex": "(a"}, "SPEC_INVALID"),
        ({"json_schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"regexp": "a"}, "regexp"),
        ({"regex": "a", "choice": ["b"]}, "has one of"),
        ({"id": "nonsense"}, "gra-"),
        ({"regex": 7}, "can't be"),
        ({"choice": 7}, "can't be"),
        ({"choice": "yes"}, "can't be"),
        ({"json_object": False}, "can't be"),
        ("text", "is an object"),
    ],
)
def test_bad_arguments_are_refused_when_submitted(llm: LLM, grammar: Any, reason: str) -> None:
    sampled = params(tokens=5)
    sampled.extra_args = {"grammar": grammar}
    with pytest.raises(VLLMValidationError, match=reason):
        llm.generate(["x"], sampled)
    with pytest.raises(VLLMValidationError, match="drop one"):
        llm.generate(["x"], asking_twice())
    assert texts(llm.generate(["x"], asking(choice=["fine"]))) == ["fine"]


def asking_twice() -> SamplingParams:
    sampled = params(regex="a")
    sampled.extra_args = {"grammar": {"regex": "b"}}
    return sampled


def test_without_a_service_the_argument_is_refused() -> None:
    with environment(None, target=""), pytest.raises(ValueError, match="GRAMMAR_CLIENT_TARGET"):
        GrammarLogitsProcessor.validate_params(asking(regex="a"))


def test_a_killed_service_ends_its_requests_and_is_used_again(model: Path) -> None:
    settings = {"step_timeout": "5", "cool_down": "0.2"}
    with running_service() as service, engine(model, service, settings) as llm:

        def disturb(_: int) -> None:
            service.kill()

        ended, free = decode(
            llm, [("x", asking(json_schema=SCHEMA)), ("x", params(tokens=30))], disturb
        )
        assert ended.finish_reason == "stop"  # the worker can but give it a stop token
        assert free.finish_reason in ("length", "stop")
        service.start()
        assert valid(decode(llm, [("x", asking(json_schema=SCHEMA))])[0])


def test_preempted_requests_come_back_with_their_history(
    model: Path, service: ServiceProcess
) -> None:
    with engine(model, service, **CRAMPED) as llm:
        sampled = [asking(seed, tokens=150, json_schema=SCHEMA) for seed in range(8)]
        wanted = [(f"prompt {seed} " * 4, each) for seed, each in enumerate(sampled)]
        for each in decode(llm, wanted):
            assert each.finish_reason == "length" or valid(each)
        name = "vllm:num_preemptions"
        assert sum(metric.value for metric in llm.get_metrics() if metric.name == name) > 0


def test_speculative_decoding_refuses_it(model: Path, service: ServiceProcess) -> None:
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with (
        engine(model, service, speculative_config=drafts) as llm,
        pytest.raises(VLLMValidationError, match="use structured_outputs"),
    ):
        llm.generate(["x"], asking(regex="a"))


@dataclasses.dataclass
class Slots:
    """What Model Runner V2 keeps of its requests, on this machine's CPU."""

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor

    def state(self) -> LogitsProcRequestState:
        return LogitsProcRequestState(
            device=torch.device("cpu"),
            max_num_reqs=len(self.tokens),
            vocab_size=VOCABULARY,
            all_token_ids=SimpleNamespace(gpu=self.tokens),
            prompt_len=SimpleNamespace(np=self.prompt_lengths.numpy()),
            prefill_len=SimpleNamespace(),
            total_len=SimpleNamespace(),
        )


def context(rows: list[tuple[int, int, int]], batch: list[int]) -> LogitsContext:
    """A step's layout, from the slot, input token and position of each row of logits."""
    slots, tokens, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    return LogitsContext(
        expanded_idx_mapping=slots,
        idx_mapping=torch.tensor(batch),
        idx_mapping_np=np.array(batch),
        expanded_local_pos=torch.zeros(len(rows)),
        input_ids=tokens,
        pos=positions,
        seq_lens_upper_bound_np=np.array([0]),
    )


def test_the_newer_runner_by_its_interface(llm: LLM, model: Path, service: ServiceProcess) -> None:
    """Model Runner V2 needs a GPU; what it passes is made here by hand, drafts among it."""
    config = llm.llm_engine.vllm_config
    vocabulary = Vocabulary.from_path(model, width=VOCABULARY)
    ids = {text: vocabulary.tokens.index(text.encode()) for text in "abcxyz"}
    slots = Slots(torch.zeros((4, 32), dtype=torch.int32), torch.tensor([3, 2, 1, 1]))
    with environment(service):
        ours: Any = GrammarLogitsProcessor(config, slots.state())
    assert ours.add_request(2, asking(regex="ab?c")) is True
    assert ours.add_request(0, params(tokens=5)) is False
    assert ours.add_request(1, asking(regex="xyz")) is True
    slots.tokens[2, :2] = torch.tensor([7, ids["a"]])  # a prompt of one token, and one after it
    slots.tokens[1, :2] = torch.tensor([7, 7])
    # Slot 1 has its first token to come; slot 2 has the drafts b and c; slot 0 is free.
    rows = [(1, 7, 1), (0, 7, 2), (2, ids["a"], 1), (2, ids["b"], 2), (2, ids["c"], 3)]
    logits = torch.zeros((5, VOCABULARY))
    for _ in range(2):  # the runner may ask twice in a step
        masked = ours.apply(logits.clone(), context(rows, [1, 0, 2]))
        found = [torch.isfinite(row).nonzero().flatten().tolist() for row in masked]
        end = list(vocabulary.stop_token_ids)
        assert found[0] == [ids["x"]] or set(found[0]) > {ids["x"]}
        assert len(found[1]) == VOCABULARY
        assert {ids["b"], ids["c"]} <= set(found[2])
        assert ids["c"] in found[3]
        assert found[4] == end
    # The slot goes to another request, whose history is shorter.
    assert ours.add_request(2, asking(choice=["z"])) is True
    slots.tokens[2, :1] = 7
    masked = ours.apply(logits[:1].clone(), context([(2, 7, 0)], [2]))
    assert torch.isfinite(masked[0]).nonzero().flatten().tolist() == [ids["z"]]


def test_ranks_of_one_engine_share_a_sequence(llm: LLM, service: ServiceProcess) -> None:
    """Each rank of a tensor-parallel group has a processor; here are two, as ranks make them."""
    config = llm.llm_engine.vllm_config
    with environment(service):
        ranks: list[Any] = [
            GrammarLogitsProcessor(config, torch.device("cpu"), False) for _ in range(2)
        ]
    output: list[int] = []
    update = SimpleNamespace(
        batch_size=1, removed=[], moved=[], added=[(0, asking(regex="(ab)+"), [1], output)]
    )
    before = service.counted("grammar_sequences_opened_total")
    for rank in ranks:
        rank.update_state(update)
    for _ in range(6):
        logits = [rank.apply(torch.zeros((1, VOCABULARY))) for rank in ranks]
        assert torch.equal(*logits)
        output.append(int(logits[0][0].argmax()))
        for rank in ranks:
            rank.update_state(None)
    assert service.counted("grammar_sequences_opened_total") == before + 1
