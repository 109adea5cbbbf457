"""Native structured outputs in `LLM`: each kind of grammar, many at once, and what they leave."""

import gc
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from engine_client import GrammarSpec, Vocabulary
from examples.tiny_model import VOCABULARY
from tests.support import ServiceProcess, wait_until
from tests.vllm.support import SCHEMA, calls, engine, manager, params, texts

TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</f>",
    },
}
OLD_TAG = {
    "structures": [{"begin": "<f>", "schema": {"enum": ["a", "b"]}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.fixture(scope="module")
def llm(model: Path, service: ServiceProcess) -> Iterator[LLM]:
    with engine(model, service) as made:
        yield made


def is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        ({"json": SCHEMA}, is_valid),
        ({"json": json.dumps(SCHEMA)}, is_valid),
        ({"regex": "[a-c]{3,6}x"}, re.compile("[a-c]{3,6}x").fullmatch),
        ({"choice": ["red", "green", "gre"]}, ["red", "green", "gre"].__contains__),
        ({"grammar": 'root ::= "x" | "(" root ")"'}, re.compile(r"\(*x\)*").fullmatch),
        ({"grammar": 'start: "y" NUMBER\nNUMBER: /[0-9]{1,3}/'}, re.compile(r"y\d+").fullmatch),
        ({"structural_tag": json.dumps(TAG)}, lambda text: is_valid(text[3:-4])),
    ],
    ids=["schema", "schema text", "regex", "choice", "ebnf", "lark", "structural tag"],
)
def test_each_kind_of_grammar(
    llm: LLM, constraint: dict[str, Any], fits: Callable[[str], object]
) -> None:
    outputs = llm.generate(["hello"] * 3, [params(seed=seed, **constraint) for seed in range(3)])
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        assert fits(output.outputs[0].text), output.outputs[0].text


def test_what_cannot_end_in_time_is_right_as_far_as_it_goes(llm: LLM) -> None:
    sampled = [params(seed=seed, json_object=True, tokens=20) for seed in range(4)]
    assert all(text.startswith("{") for text in texts(llm.generate(["hello"] * 4, sampled)))
    free = texts(llm.generate(["x"], params(structural_tag=json.dumps(OLD_TAG), tokens=30)))
    assert "<f" not in free[0] or re.search(r"<f>\"[ab]", free[0])


def test_sixteen_at_once_with_free_ones_among_them_in_one_call_a_step(llm: LLM) -> None:
    llm.generate(["hello"], params(choice=["first"]))
    before, sent = manager(llm).steps, calls(llm)
    wanted: list[dict[str, Any]] = [{}, {"json": SCHEMA}, {"regex": "[0-9]{2}"}, {"choice": ["no"]}]
    sampled = [params(seed=i, **wanted[i % 4]) for i in range(16)]
    outputs = llm.generate([f"prompt {i}" for i in range(16)], sampled)
    found = texts(outputs)
    assert all(is_valid(text) for text in found[1::4])
    assert all(re.fullmatch("[0-9]{2}", text) for text in found[2::4])
    assert set(found[3::4]) == {"no"}
    longest = max(len(outputs[i].outputs[0].token_ids) for i in range(16) if i % 4)
    assert manager(llm).steps - before == calls(llm) - sent <= longest + 3


def test_n_completions_go_ways_of_their_own(llm: LLM) -> None:
    sampled = params(json=SCHEMA)
    sampled.n = 4
    (output,) = llm.generate(["hello"], sampled)
    assert len(output.outputs) == 4
    assert all(is_valid(completion.text) for completion in output.outputs)
    assert len({completion.text for completion in output.outputs}) > 1


def test_one_params_object_serves_many_prompts(llm: LLM) -> None:
    shared, others = params(json=SCHEMA), [params(regex=f"{digit}{{5}}") for digit in "789"]
    prompts = [f"prompt {i}" for i in range(9)]
    found = texts(llm.generate(prompts, [shared, others[0], shared, others[1], shared, others[2],
                                         shared, shared, others[0]]))  # fmt: skip
    assert all(is_valid(found[i]) for i in (0, 2, 4, 6, 7))
    assert [found[i] for i in (1, 3, 5, 8)] == ["77777", "88888", "99999", "77777"]


def test_a_prompt_that_is_cached_is_masked_as_well(llm: LLM) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 8
    for seed in range(3):
        assert is_valid(texts(llm.generate([prompt], params(seed=seed, json=SCHEMA)))[0])


def test_nothing_is_left_behind(llm: LLM, service: ServiceProcess) -> None:
    llm.generate(["hello"] * 4, params(json=SCHEMA))
    gc.collect()
    wait_until(lambda: service.counted("grammar_sequences") == 0)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems at /"),
        ({"json": {"type": "no such"}}, "SPEC_INVALID"),
        ({"json": "{"}, "no JSON"),
        ({"regex": "(a"}, "SPEC_INVALID"),
        ({"grammar": "root ::= missing"}, "SPEC_INVALID"),
        ({"grammar": "gra-" + "0" * 32}, "UNKNOWN_GRAMMAR"),
        ({"structural_tag": "nonsense"}, "no JSON"),
        ({"json": SCHEMA, "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason_when_it_is_submitted(
    llm: LLM, constraint: dict[str, Any], reason: str
) -> None:
    with pytest.raises(VLLMValidationError, match=reason):
        llm.generate(["hello"], params(**constraint))
    assert texts(llm.generate(["hello"], params(choice=["fine"]))) == ["fine"]


def test_a_grammar_by_id(llm: LLM, model: Path, service: ServiceProcess) -> None:
    vocabulary = Vocabulary.from_path(model, width=VOCABULARY)
    with service.client() as client:
        grammar = client.compile(GrammarSpec.regex("(by|an) id"), vocabulary)
    assert texts(llm.generate(["x"], params(grammar=grammar.id)))[0] in ("by id", "an id")


@pytest.mark.parametrize(("width", "reason"), [(64, "64 columns"), (VOCABULARY, "tokenizer")])
def test_a_grammar_of_another_tokenizer_is_refused(
    llm: LLM, service: ServiceProcess, width: int, reason: str
) -> None:
    other = Vocabulary([bytes([65 + i]) for i in range(26)] + [b"<eos>"], width, (26,), (26,))
    with service.client() as client:
        grammar = client.compile(GrammarSpec.regex("[A-F]{3}"), other)
    with pytest.raises(VLLMValidationError, match=reason):
        llm.generate(["x"], params(grammar=grammar.id))


def test_a_stop_token_that_the_tokenizer_lacks_is_let_pass(llm: LLM) -> None:
    sampled = params(choice=["fine"])
    sampled.stop_token_ids = [VOCABULARY - 1]
    assert texts(llm.generate(["x"], sampled)) == ["fine"]


def test_a_token_that_its_mask_forbids_is_an_error_at_once(llm: LLM) -> None:
    """Nothing is left to sample, and so vLLM samples anything."""
    sampled = params(choice=["abc"], tokens=1)
    sampled.allowed_token_ids = [5, 6]
    (output,) = llm.generate(["x"], sampled)
    assert output.outputs[0].finish_reason == "error"


def test_dictionaries_stay_open_and_keys_in_order(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"const": 1}, "a": {"type": "object"}},
        "required": ["b", "a"],
    }
    sampled = [params(seed=seed, json=schema, tokens=60) for seed in range(8)]
    found = texts(llm.generate(["x"] * 8, sampled))
    assert all(re.match(r'\{\s*"b"\s*:\s*1\s*,\s*"a"', text) for text in found)
    assert any(re.search(r'"a"\s*:\s*\{\s*"', text) for text in found)


def test_an_engine_without_a_tokenizer_takes_ids(model: Path, service: ServiceProcess) -> None:
    vocabulary = Vocabulary.from_path(model, width=VOCABULARY)
    with service.client() as client:
        grammar = client.compile(GrammarSpec.regex("[ab]{4}"), vocabulary)
    (end,) = vocabulary.stop_token_ids
    sampled = SamplingParams(
        max_tokens=10,
        stop_token_ids=[end],
        structured_outputs=StructuredOutputsParams(grammar=grammar.id),
        detokenize=False,
    )
    with engine(model, service, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampled)
        tokens = output.outputs[0].token_ids
        text = b"".join(vocabulary.tokens[token] for token in tokens if token != end)
        assert re.fullmatch(b"[ab]{4}", text)
        sampled.structured_outputs = StructuredOutputsParams(json=SCHEMA)
        with pytest.raises(VLLMValidationError, match="no tokenizer"):
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampled)


def test_without_white_space_there_is_none(model: Path, service: ServiceProcess) -> None:
    config = {"backend": "xgrammar", "disable_any_whitespace": True}
    with engine(model, service, structured_outputs_config=config) as llm:
        sampled = [params(seed=seed, json=SCHEMA) for seed in range(4)]
        for text in texts(llm.generate(["hello"] * 4, sampled)):
            assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def test_objects_are_closed_or_open_as_the_configured_backend_has_them(
    model: Path, service: ServiceProcess
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for config, closed in (
        ({"backend": "auto"}, True),
        ({"backend": "guidance"}, False),
        ({"backend": "guidance", "disable_additional_properties": True}, True),
    ):
        with engine(model, service, structured_outputs_config=config) as llm:
            sampled = [params(seed=seed, json=schema, tokens=60) for seed in range(12)]
            found = texts(llm.generate(["hello"] * 12, sampled))
            only = [text for text in found if re.fullmatch(r'\{\s*"a"\s*:\s*1\s*\}', text)]
            assert (len(only) == len(found)) is closed, (config, found)
