"""The logits processor in real `generate` calls of tiny models, against a real service."""

import json
import re
import string
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, cast

import jsonschema
import pytest
import torch
import xgrammar
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, StoppingCriteria

from engine_client import Grammar, GrammarClient, GrammarSpec, Outcome, Policy, UsageError
from engine_client.in_process import compile_spec
from engine_client.transformers import GrammarLogitsProcessor
from engine_client.types import Note, Row, StepResult
from tests.support import running_service, toy, wait_until

TOKENS = [*string.printable[:95], '{"', '":', '",', "true", "ab", "<pad>", "<eos>"]
PAD, EOS = len(TOKENS) - 2, len(TOKENS) - 1
VOCABULARY = toy(TOKENS, stop=[EOS], special=[PAD])
WIDER = len(TOKENS) + 5
PROMPTS = ["one", "second", "3", "row four", "5th"]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
PATTERN = "[a-f]{3,6}-[0-9]{2}"
CHOICES = ["yes", "no", "perhaps"]
SPECS = {
    "schema": GrammarSpec.json_schema(SCHEMA, max_whitespace=0, backend="xgrammar"),
    "regex": GrammarSpec.regex(PATTERN),
    "choice": GrammarSpec.choice(CHOICES),
}


def check(name: str, text: str) -> None:
    """Fails unless the text, whole, is what the spec of that name means."""
    match name:
        case "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "regex":
            assert re.fullmatch(PATTERN, text), text
        case _:
            assert text in CHOICES


@cache
def model(width: int = len(TOKENS), seed: int = 0) -> LlamaForCausalLM:
    """A tiny model with random weights, spread widely so that its choices are decided."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def inputs(prompts: list[str]) -> dict[str, torch.Tensor]:
    """The prompts, padded on the left to one length."""
    length = max(map(len, prompts))
    ids = [[PAD] * (length - len(p)) + [TOKENS.index(char) for char in p] for p in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": (torch.tensor(ids) != PAD).long()}


def generate(processor: LogitsProcessor | None, prompts: list[str], **options: Any) -> Any:
    """Runs the tiny model; everything that it returns."""
    wide = options.pop("wide", False)
    return cast(Any, model(WIDER if wide else len(TOKENS))).generate(
        **inputs(prompts),
        logits_processor=[*([processor] if processor else []), *options.pop("more", [])],
        **{"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True} | options,
    )


def text(sequence: torch.Tensor, prompts: list[str]) -> str:
    """What was generated; fails unless it came to its end."""
    tokens = sequence[max(map(len, prompts)) :].tolist()
    assert EOS in tokens, tokens
    return "".join(TOKENS[token] for token in tokens[: tokens.index(EOS)])


class At(StoppingCriteria):
    """Does something once, after so many steps; never stops a row."""

    def __init__(self, steps: int, action: Callable[[], object]) -> None:
        self._steps = steps
        self._action = action

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.BoolTensor:
        self._steps -= 1
        if self._steps == 0:
            self._action()
        return cast(torch.BoolTensor, torch.zeros(len(input_ids), dtype=torch.bool))


@pytest.fixture
def processor(client: GrammarClient) -> GrammarLogitsProcessor:
    return GrammarLogitsProcessor(client)


@pytest.fixture
def grammars(client: GrammarClient) -> dict[str, Grammar]:
    return compiled(client)


def compiled(client: GrammarClient) -> dict[str, Grammar]:
    return {name: client.compile(spec, VOCABULARY) for name, spec in SPECS.items()}


def legal(spec: GrammarSpec, tokens: list[int]) -> torch.Tensor:
    """bool[width]: what a plain matcher that replays the tokens allows next."""
    matcher = xgrammar.GrammarMatcher(compile_spec(spec, VOCABULARY), override_stop_tokens=[EOS])
    assert all(matcher.accept_token(token) for token in tokens)
    mask = xgrammar.allocate_token_bitmask(1, VOCABULARY.width)
    matcher.fill_next_token_bitmask(mask)
    bits = mask.view(-1, 1) >> torch.arange(32, dtype=torch.int32) & 1
    return bits.view(-1)[: VOCABULARY.width].bool()


def test_a_batch_with_different_grammars_and_free_rows(
    processor: GrammarLogitsProcessor, grammars: dict[str, Grammar]
) -> None:
    names = ["schema", None, "regex", None, "choice"]
    entries = [grammars[name] if name else None for name in names]
    kept = {"output_scores": True, "output_logits": True}
    plain = generate(None, PROMPTS)
    with processor.batch(entries) as batch:
        output = generate(processor, PROMPTS, **kept)
    assert batch.problems == []
    length = max(map(len, PROMPTS))
    for row, name in enumerate(names):
        if name is None:
            assert torch.equal(output.sequences[row], plain.sequences[row])
            continue
        check(name, text(output.sequences[row], PROMPTS))
        tokens = output.sequences[row, length:].tolist()
        for step in range(tokens.index(EOS) + 1):
            allowed = legal(SPECS[name], tokens[:step])
            scores, logits = output.scores[step][row], output.logits[step][row]
            assert logits.isfinite().all()  # the raw logits weren't written to
            assert torch.equal(scores, logits.where(allowed, -torch.inf))
    for scores, logits in zip(output.scores, output.logits, strict=True):
        assert torch.equal(scores[[1, 3]], logits[[1, 3]])


def test_without_a_grammar_there_is_no_step(
    client: GrammarClient, processor: GrammarLogitsProcessor
) -> None:
    with processor.batch([None] * 5):
        output = generate(processor, PROMPTS)
    assert torch.equal(output.sequences, generate(None, PROMPTS).sequences)
    assert "steps" not in client.stats.snapshot()


@pytest.mark.parametrize("wide", [False, True])
def test_samples_of_each_prompt(
    processor: GrammarLogitsProcessor, grammars: dict[str, Grammar], wide: bool
) -> None:
    torch.manual_seed(1)
    entries = [grammars["schema"], None, grammars["regex"]]
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 4, "wide": wide}
    with processor.batch(entries) as batch:
        output = generate(processor, PROMPTS[:3], **options)
    texts = [
        text(sequence, PROMPTS[:3]) for sequence in [*output.sequences[:4], *output.sequences[8:]]
    ]
    for index, sample in enumerate(texts):
        check("schema" if index < 4 else "regex", sample)
    assert len(set(texts)) > 4
    assert len(batch.sequence_ids) == 8
    assert batch.problems == []


def test_beams(processor: GrammarLogitsProcessor, grammars: dict[str, Grammar]) -> None:
    options = {"num_beams": 4, "num_return_sequences": 2, "output_scores": True}
    with processor.batch([grammars["schema"], grammars["regex"], None]):
        output = generate(processor, PROMPTS[:3], **options)
    for index, name in enumerate(["schema", "schema", "regex", "regex"]):
        check(name, text(output.sequences[index], PROMPTS[:3]))
    free = generate(None, PROMPTS[:3], **options)
    assert torch.equal(output.sequences[4:], free.sequences[4:])


def test_beams_that_run_out_of_legal_tokens(
    processor: GrammarLogitsProcessor, grammars: dict[str, Grammar]
) -> None:
    with processor.batch([grammars["choice"]]) as batch:
        output = generate(processor, PROMPTS[:1], num_beams=6, num_return_sequences=3)
    found = {text(sequence, PROMPTS[:1]) for sequence in output.sequences}
    assert found == set(CHOICES)
    assert {problem.outcome for problem in batch.problems} <= {Outcome.REJECTED}


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": True}])
def test_assisted_decoding(
    processor: GrammarLogitsProcessor, grammars: dict[str, Grammar], options: dict[str, Any]
) -> None:
    prompts = ['{"name":"ab-12"}']
    if "assistant_model" in options:
        options = {"assistant_model": model(seed=1)}
    for name, grammar in grammars.items():
        with processor.batch([grammar]) as batch:
            plain = generate(processor, prompts)
        with processor.batch([grammar]) as batch:
            output = generate(processor, prompts, **options)
        assert text(output.sequences[0], prompts) == text(plain.sequences[0], prompts)
        check(name, text(output.sequences[0], prompts))
        assert batch.problems == []


def test_one_processor_for_calls_in_sequence_and_in_threads(
    processor: GrammarLogitsProcessor, grammars: dict[str, Grammar]
) -> None:
    def run(names: list[str]) -> list[str]:
        prompts = PROMPTS[: len(names)]
        with processor.batch([grammars[name] for name in names], stop_token_ids=EOS) as batch:
            output = generate(processor, prompts)
        assert batch.problems == []
        return [text(sequence, prompts) for sequence in output.sequences]

    orders = [["schema", "regex"], ["regex", "choice", "schema"], ["choice"]]
    expected = [run(names) for names in orders]
    for names, texts in zip(orders, expected, strict=True):
        for name, found in zip(names, texts, strict=True):
            check(name, found)
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(run, orders * 2)) == expected * 2


def test_the_end_of_a_batch_closes_its_sequences(
    client: GrammarClient, processor: GrammarLogitsProcessor, grammars: dict[str, Grammar]
) -> None:
    with processor.batch([grammars["regex"]]) as batch:
        generate(processor, PROMPTS[:1])
        assert client.fork(batch.sequence_ids[0], ["transformers-fork"])
    wait_until(lambda: not client.fork(batch.sequence_ids[0], ["transformers-fork"]))
    client.close_sequences(["transformers-fork"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_scores_of_every_kind(
    processor: GrammarLogitsProcessor, grammars: dict[str, Grammar], dtype: torch.dtype
) -> None:
    ids = cast(torch.LongTensor, torch.tensor([[1, 2], [3, 4]]))
    scores = torch.randn(2, WIDER, dtype=dtype)
    with processor.batch([None, grammars["choice"]]):
        masked = processor(ids, scores)
    assert torch.equal(masked[0], scores[0])
    assert masked.dtype == dtype
    firsts = [TOKENS.index(char) for char in "ynp"]
    assert masked[1].isfinite().nonzero().flatten().tolist() == sorted(firsts)
    assert torch.equal(masked[1, firsts], scores[1, firsts])


def test_a_row_with_an_illegal_token_ends_and_is_told(
    processor: GrammarLogitsProcessor, grammars: dict[str, Grammar]
) -> None:
    prompts = PROMPTS[:2]

    def force(input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == max(map(len, prompts)) + 2:
            scores[0] = torch.where(torch.arange(len(TOKENS)) == TOKENS.index("!"), 0, -torch.inf)
        return scores

    with processor.batch([grammars["regex"], grammars["schema"]]) as batch:
        output = generate(processor, prompts, more=[force])
    assert text(output.sequences[0], prompts)[2:] == "!"
    check("schema", text(output.sequences[1], prompts))
    [problem] = batch.problems
    assert problem[:2] == (0, Outcome.REJECTED)
    assert problem.reason
    assert problem.message


def test_a_service_killed_and_started_again() -> None:
    def restart() -> None:
        service.kill()
        service.launch()

    with running_service() as service, service.client(step_timeout=60) as client:
        grammars, processor = compiled(client), GrammarLogitsProcessor(client)
        names = ["schema", "regex", "schema"]
        entries = [grammars[name] for name in names]
        with processor.batch(entries):
            plain = generate(processor, PROMPTS[:3])
        with processor.batch(entries) as batch:
            output = generate(processor, PROMPTS[:3], stopping_criteria=[At(4, restart)])
        assert torch.equal(output.sequences, plain.sequences)
        for name, sequence in zip(names, output.sequences, strict=True):
            check(name, text(sequence, PROMPTS[:3]))
        assert batch.problems == []
        assert client.stats.snapshot()["connects"] == 2
        assert client.stats.snapshot()["healed_unknown_grammar"] == 3


@pytest.mark.parametrize("policy", list(Policy))
def test_a_service_that_is_gone_for_good(policy: Policy) -> None:
    with (
        running_service() as service,
        service.client(step_timeout=0.5, cool_down=60, policy=Policy.IN_PROCESS) as client,
    ):
        grammars, processor = compiled(client), GrammarLogitsProcessor(client)
        entries = [grammars["schema"], None, grammars["regex"]]
        with processor.batch(entries, policy=policy) as batch:
            output = generate(processor, PROMPTS[:3], stopping_criteria=[At(3, service.kill)])
    tokens = output.sequences[:, max(map(len, PROMPTS[:3])) :].tolist()
    assert {problem.row for problem in batch.problems} == {0, 2}
    reasons = {Policy.FAIL: "SERVICE_UNREACHABLE", Policy.IN_PROCESS: "IN_PROCESS"}
    reason = reasons.get(policy, "UNCONSTRAINED")
    assert {problem.reason for problem in batch.problems} == {reason}
    failed = {problem.outcome is Outcome.FAILED for problem in batch.problems}
    assert failed == {policy is Policy.FAIL}
    match policy:
        case Policy.FAIL:
            assert [tokens[row].index(EOS) for row in (0, 2)] == [3, 3]
        case Policy.IN_PROCESS:
            check("schema", text(output.sequences[0], PROMPTS[:3]))
            check("regex", text(output.sequences[2], PROMPTS[:3]))
        case Policy.UNCONSTRAINED:
            assert len(tokens[0]) == 40


def test_steps_that_never_arrived_leave_no_wrong_mask(
    client: GrammarClient, processor: GrammarLogitsProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(rows: Sequence[Row]) -> StepResult:
        masks = torch.zeros((1, rows[0].grammar.words), dtype=torch.int32)
        return StepResult(masks, [Outcome.FAILED], [0], [0], {0: Note("SERVICE_UNREACHABLE")})

    def step(history: str) -> list[int]:
        ids = torch.tensor([[0, *map(TOKENS.index, history)]])
        masked = processor(cast(torch.LongTensor, ids), torch.zeros(1, len(TOKENS)))
        return masked[0].isfinite().nonzero().flatten().tolist()

    grammar = client.compile(GrammarSpec.regex("ac{4}x|bc{4}y"), VOCABULARY)
    with processor.batch([grammar]):
        assert step("") == [TOKENS.index("a"), TOKENS.index("b")]
        assert step("acc") == [TOKENS.index("c")]
        with monkeypatch.context() as patch:
            patch.setattr(client, "step", lost)
            assert step("bcc") == []
        # The service still has "acc", and only the last token is new since the last call.
        assert step("bccc") == [TOKENS.index("c")]
        assert step("bcccc") == [TOKENS.index("y")]


def test_misuse_says_what_to_do(
    client: GrammarClient, processor: GrammarLogitsProcessor, grammars: dict[str, Grammar]
) -> None:
    def refused(entries: list[Grammar | None], message: str, columns: int = len(TOKENS)) -> None:
        with pytest.raises(UsageError, match=message), processor.batch(entries):
            processor(ids, scores[:, :columns])

    grammar = grammars["regex"]
    ids = cast(torch.LongTensor, torch.tensor([[1, 2], [3, 4], [5, 6]]))
    scores = torch.zeros(3, len(TOKENS))
    with pytest.raises(UsageError, match="inside `with processor"):
        processor(ids, scores)
    other = GrammarLogitsProcessor(client)
    with other.batch([grammar]), pytest.raises(UsageError, match="no batch of this"):
        processor(ids, scores)
    with processor.batch([grammar]):
        processor(ids, scores)
        for others in (ids + 1, ids[:2], ids[:, :1]):
            with pytest.raises(UsageError, match="open a batch for each generate call"):
                processor(cast(torch.LongTensor, others), scores)
    refused([], "one grammar, or None, for each prompt")
    refused([grammar] * 2, "2 grammars can't be spread over 3 rows")
    refused([grammar], "the vocabulary 102", columns=101)
    spec = GrammarSpec.regex("a{3}")
    another = client.compile(spec, toy(["a", "b", "<eos>"], stop=[2]))
    refused([grammar, another, None], "different vocabularies")
    refused([client.compile(spec, toy(["a", "b"], stop=[]))], "pass stop_token_ids")
    with pytest.raises(UsageError, match="don't all lie within"):
        processor.batch([grammar], stop_token_ids=len(TOKENS)).__enter__()
