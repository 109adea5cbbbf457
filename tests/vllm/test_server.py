"""OpenAI's API in vLLM's server: every way to ask for a constraint, many at once, bad ones."""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from engine_client import GrammarSpec, Vocabulary
from examples.tiny_model import CALL, THOUGHT, VOCABULARY
from tests.support import wait_until
from tests.vllm.server import (
    SCHEMA,
    Served,
    by_schema,
    constrained,
    is_valid,
    letters,
    read,
    serving,
    text_of,
)

# Whichever test comes first waits for the server.
pytestmark = pytest.mark.timeout(420)

TAG: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</f>",
    },
}
UNIQUE = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": SCHEMA | {"title": name}, "strict": True},
    }
    for name in ("hire", "dismiss")
]
OPTIONS = ["--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3"]
# Only requests that say so think.
OPTIONS += ["--default-chat-template-kwargs", '{"enable_thinking": false}']


_DEEP = '{"items":' * 900 + "{}" + "}" * 900
# A bad request, and what its refusal has to say.
BAD: list[tuple[dict[str, Any], list[str]]] = [
    # Schemas that are none: the pointer, and what is wrong there.
    (by_schema({"type": "strin"}), ["/type", "strin"]),
    (by_schema({"properties": {"a": {"type": ["string", 1]}}}), ["/properties/a/type"]),
    (by_schema({"type": "integer", "minimum": "x"}), ["/minimum", "'x'"]),
    (by_schema({"type": "object", "required": "a"}), ["/required", "list of names"]),
    (by_schema({"properties": {"kind": {}, "size": "large"}}), ["/properties/size", "large"]),
    (by_schema({"minLength": -1}), ["/minLength", "-1"]),
    (by_schema({"allOf": []}), ["/allOf"]),
    (by_schema({"items": {"anyOf": {}}}), ["/items/anyOf"]),
    (by_schema({"enum": "a"}), ["/enum"]),
    (by_schema({"$ref": "#/nope"}), ["/$ref", "#/nope", "no target"]),
    (by_schema({"items": {"$ref": "#/$defs/a"}}), ["/items/$ref", "#/$defs/a"]),
    (by_schema({"$ref": "http://example.com/x"}), ["/$ref", "http://example.com/x"]),
    (
        by_schema({"properties": {"a": {"pattern": "("}}}),
        ["/properties/a/pattern", "no regular expression"],
    ),
    (by_schema({"items": {"pattern": "[z-a]"}}), ["/items/pattern"]),
    (by_schema({"patternProperties": {"(": {}}}), ["/patternProperties"]),
    # Keywords that no mask enforces: which, and where.
    (by_schema({"type": "array", "uniqueItems": True}), ["uniqueItems at /"]),
    (
        by_schema({"properties": {"a": {"type": "array", "uniqueItems": True}}}),
        ["uniqueItems at /properties/a"],
    ),
    (
        by_schema({"type": "array", "contains": {"const": 1}, "minContains": 2}),
        ["contains at /", "minContains at /"],
    ),
    (
        by_schema({"unevaluatedProperties": False, "anyOf": [{"required": ["a"]}, {}]}),
        ["unevaluatedProperties at /"],
    ),
    (
        by_schema({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}),
        ["pattern at /properties/a"],
    ),
    (by_schema({"enum": []}), ["SPEC_INVALID", "no value fits"]),
    (by_schema({"type": "integer", "minimum": 5, "maximum": 1}), ["SPEC_INVALID", "no value fits"]),
    # The same by vLLM's own parameter.
    (constrained(json={"type": "strin"}), ["/type", "strin"]),
    (constrained(json='{"type": "strin"}'), ["/type", "strin"]),
    (constrained(json={"type": "array", "uniqueItems": True}), ["uniqueItems at /"]),
    (constrained(json="nope"), ["no JSON"]),
    (constrained(json="[1, 2]"), ["JSON object"]),
    (constrained(json=""), ["source"]),
    (constrained(json='{"a":' * 5000), ["nested too deeply"]),
    (constrained(json=_DEEP), ["schema_depth"]),
    (constrained(json={}, whitespace_pattern=" "), ["whitespace_pattern"]),
    # Expressions.
    (constrained(regex="("), ["regular expression"]),
    (constrained(regex="(?=a)b"), ["no look-around"]),
    (constrained(regex="a(?!b)"), ["no look-around"]),
    (constrained(regex="(?<=a)b"), ["no look-around"]),
    (constrained(regex=r"(a)\1"), ["no back references"]),
    (constrained(regex="a{2,1}"), ["regular expression"]),
    (constrained(regex="[z-a]"), ["regular expression"]),
    (constrained(regex="[a-"), ["regular expression"]),
    (constrained(regex="*a"), ["regular expression"]),
    (constrained(regex="\\"), ["regular expression"]),
    (constrained(regex=""), ["source"]),
    # Grammars.
    (constrained(grammar="root ::= "), ["GBNF"]),
    (constrained(grammar="root ::= item"), ["GBNF", '"item" is not defined']),
    (constrained(grammar='x ::= "a"'), ["GBNF", '"root" is not defined']),
    (constrained(grammar='root ::= "a'), ["GBNF"]),
    (constrained(grammar="start: item"), ["Lark", '"item"']),
    (constrained(grammar="start: /(/"), ["Lark", "unclosed group"]),
    (constrained(grammar=""), ["source"]),
    (constrained(grammar="gra-" + "0" * 32), ["UNKNOWN_GRAMMAR", "gra-000"]),
    (constrained(grammar="gra-123"), ["gra-123"]),
    # Choices, tags, and requests that vLLM itself turns down.
    (constrained(choice=[]), ["choices"]),
    (constrained(choice=["a", ""]), ["a choice is empty"]),
    (
        {"response_format": TAG | {"format": TAG["format"] | {"content": UNIQUE}}},
        ["uniqueItems at /format/content/json_schema"],
    ),
    (constrained(structural_tag="{}"), ["structural_tag"]),
    (constrained(json_object=False), ["no constraint"]),
    (constrained(regex="a", choice=["b"]), ["one kind"]),
    ({"response_format": {"type": "json_schema"}}, ["json_schema"]),
]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    # Slow is not what is tested here: a restart of the service, and a bad spec's refusal, are
    # waited for however busy the machine is.
    patience = {"step_timeout": "240", "timeout": "120", "validate_seconds": "120"}
    with serving(model, [], OPTIONS, **patience) as served:
        yield served


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> Vocabulary:
    return Vocabulary.from_path(model, width=VOCABULARY)


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        (by_schema(SCHEMA), is_valid),
        (constrained(json=SCHEMA), is_valid),
        (constrained(regex="[a-c]{3,6}x"), re.compile("[a-c]{3,6}x").fullmatch),
        (constrained(choice=["red", "green", "gre"]), ["red", "green", "gre"].__contains__),
        (constrained(grammar='root ::= "x" | "(" root ")"'), re.compile(r"\(*x\)*").fullmatch),
        (constrained(structural_tag=json.dumps(TAG)), lambda text: is_valid(text[3:-4])),
        ({"response_format": TAG}, lambda text: is_valid(text[3:-4])),
    ],
    ids=["response_format", "json", "regex", "choice", "ebnf", "structural tag", "tag by format"],
)
def test_each_kind_of_grammar(server: Served, parameters: dict[str, Any], fits: Any) -> None:
    for seed in range(3):
        text = text_of(server.ask(seed=seed, **parameters))
        assert fits(text), text


def test_a_json_object(server: Served) -> None:
    texts = set()
    for seed in range(6):
        answer = server.ask(seed=seed, response_format={"type": "json_object"})
        [choice] = answer.choices
        texts.add(choice.message.content)
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    assert len(texts) > 1


def test_a_grammar_by_its_id(server: Served, vocabulary: Vocabulary) -> None:
    with server.service.client() as client:
        grammar = client.compile(GrammarSpec.regex("[0-9]{3}-[0-9]{4}"), vocabulary)
    text = text_of(server.ask(**constrained(grammar=grammar.id)))
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", text)


def test_a_stream(server: Served) -> None:
    chunks = list(server.ask(stream=True, **by_schema(SCHEMA)))
    assert len(chunks) > 5
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert read(chunks) == text_of(server.ask(**by_schema(SCHEMA)))
    assert is_valid(read(chunks))


@pytest.mark.parametrize("choice", ["hire", "required"])
def test_a_tool_call(server: Served, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    parameters: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required" if choice == "required" else named,
        "parallel_tool_calls": False,
    }
    for seed in range(3):
        [answer] = server.ask(seed=seed, **parameters).choices
        [call] = answer.message.tool_calls
        assert call.function.name in (["hire", "dismiss"] if choice == "required" else [choice])
        assert is_valid(call.function.arguments)
        deltas = [
            delta.function
            for chunk in server.ask(seed=seed, stream=True, **parameters)
            for delta in chunk.choices[0].delta.tool_calls or []
        ]
        assert [delta.name for delta in deltas if delta.name] == [call.function.name]
        streamed = "".join(delta.arguments or "" for delta in deltas)
        assert json.loads(streamed) == json.loads(call.function.arguments)


def test_four_choices(server: Served) -> None:
    choices = server.ask(n=4, **by_schema(SCHEMA)).choices
    assert [choice.finish_reason for choice in choices] == ["stop"] * 4
    texts = {choice.message.content for choice in choices}
    assert len(texts) == 4
    assert all(map(is_valid, texts))


def test_sixteen_at_once(server: Served) -> None:
    asked: list[tuple[dict[str, Any], Any]] = [
        (by_schema(SCHEMA), is_valid),
        (constrained(regex="[a-f]{80}"), re.compile("[a-f]{80}").fullmatch),
        ({"max_tokens": 60}, None),
        (constrained(choice=["red", "green"]), ["red", "green"].__contains__),
    ] * 4

    def judge(seed: int) -> bool:
        parameters, fits = asked[seed]
        answer = server.ask(seed=seed, **parameters)
        return bool(fits(text_of(answer))) if fits else answer.usage.completion_tokens > 0

    with ThreadPoolExecutor(len(asked)) as pool:
        assert all(pool.map(judge, range(len(asked))))


def test_an_abort_leaves_nothing_behind(server: Served) -> None:
    stream = server.ask(stream=True, n=4, **letters(900))
    read(stream, 8)
    assert server.service.counted("grammar_sequences") >= 4
    stream.close()
    wait_until(lambda: server.service.counted("grammar_sequences") == 0, 30)
    assert text_of(server.ask(**constrained(choice=["on"]))) == "on"


def test_an_engine_that_goes_idle_keeps_nothing(server: Served) -> None:
    assert text_of(server.ask(**constrained(choice=["on"]))) == "on"
    wait_until(lambda: server.service.counted("grammar_sequences") == 0, 30)


def test_what_follows_the_thoughts_is_constrained(server: Served, vocabulary: Vocabulary) -> None:
    # Likely after some tokens. A call would end the thoughts as well, and be part of the answer.
    bias = {
        str(vocabulary.tokens.index(THOUGHT.encode())): 4,
        str(vocabulary.tokens.index(CALL.encode())): -100,
    }
    parameters: dict[str, Any] = {
        "chat_template_kwargs": {"enable_thinking": True},
        "logit_bias": bias,
    }
    thoughts = []
    for seed in range(4):
        answer = server.ask(seed=seed, **parameters, **by_schema(SCHEMA))
        assert is_valid(text_of(answer))
        thoughts.append(answer.choices[0].message.reasoning)
    assert len({thought for thought in thoughts if thought}) > 1, thoughts
    stream = server.ask(stream=True, **parameters, **by_schema(SCHEMA))
    assert is_valid(read(stream))


def test_fifty_bad_requests_among_good_ones(server: Served) -> None:
    """Each bad one is a 400 that says why; the good ones aren't harmed."""

    def judge(number: int) -> str:
        parameters, says = BAD[number]
        try:
            answer = server.ask(max_tokens=5, **parameters)
        except openai.BadRequestError as error:
            missing = [text for text in says if text not in str(error)]
            return f"{parameters}: {missing} missing in {error}" if missing else ""
        except openai.APIError as error:
            return f"{parameters}: {error}"
        return f"{parameters}: {answer}"

    def good(number: int) -> str:
        text = text_of(server.ask(**constrained(choice=[f"yes{number}"])))
        return "" if text == f"yes{number}" else text

    assert len(BAD) >= 50
    with ThreadPoolExecutor(4) as pool:
        turns = itertools.chain.from_iterable(
            (pool.submit(judge, number), pool.submit(good, number)) for number in range(len(BAD))
        )
        wrong = [problem for turn in list(turns) if (problem := turn.result())]
    assert not wrong, "\n".join(wrong)


def test_a_service_killed_and_restarted_in_mid_stream(server: Served) -> None:
    stream = server.ask(stream=True, **letters(400))
    text = read(stream, 10)
    server.service.kill()
    server.service.start()
    text += read(stream)
    assert re.fullmatch("[a-f]{400}", text)
    # The new service went on with it.
    assert server.service.counted("grammar_steps_total") > 0
    assert text == text_of(server.ask(**letters(400))), "undisturbed it's another text"
