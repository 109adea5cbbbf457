"""Specs that would hurt, leak or drag, and what callers are told: reduced public reports."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from engine_client import GrammarClient, GrammarSpec, Outcome, Refused, Row
from tests.cases import OBJECT, OBJECT_TOKENS, TEXT, Request
from tests.cases.test_schemas import BYTES, Case, accepts, assert_admits
from tests.support import ServiceProcess, running_service, toy

MIB = 1 << 20
_TEXT = {"type": "string"}


def _texts(most: int, length: int) -> dict[str, Any]:
    return {"type": "array", "maxItems": most, "items": {**_TEXT, "maxLength": length}}


def _closed(properties: dict[str, Any]) -> GrammarSpec:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return GrammarSpec.json_schema({**schema, "additionalProperties": False})


def _nested(levels: int) -> str:
    """Arrays in arrays, as text: no parser made it."""
    return '{"type":"array","items":' * levels + '{"type":"integer"}' + "}" * levels


@pytest.fixture(scope="module")
def own_service() -> Iterator[ServiceProcess]:
    """One whose memory is looked at, with one compile at a time."""
    with running_service("--compile-workers=1", "--compile-seconds=10") as process:
        yield process


# What is refused, and what the refusal says; the service serves on.
@pytest.mark.parametrize(
    ("spec", "reason", "says"),
    [
        pytest.param(
            GrammarSpec.json_schema(
                {"properties": {"kind": {"type": "string"}, "size": "large"}, "required": ["kind"]}
            ),
            *("SPEC_INVALID", "/properties/size"),
            id="vllm-project/vllm#17248 a plain string as a schema",
        ),
        pytest.param(
            GrammarSpec.json_schema({"properties": {"x": {"type": "thing", "pattern": "([0-9]+"}}}),
            *("SPEC_INVALID", "/properties/x"),
            id="CVE-2025-48944 no such type",
        ),
        pytest.param(
            GrammarSpec.json_schema({"properties": {"x": {"type": "string", "pattern": "(a+"}}}),
            *("SPEC_INVALID", "/properties/x/pattern"),
            id="CVE-2025-48944 no such pattern",
        ),
        pytest.param(
            GrammarSpec.json_schema({"properties": {"x": {**_TEXT, "required": True}}}),
            *("SPEC_INVALID", "/properties/x/required"),
            id="dottxt-ai/outlines-core#180 a boolean as required",
        ),
        pytest.param(
            GrammarSpec.regex("[0-9"),
            *("SPEC_INVALID", "expected a regular expression"),
            id="vllm-project/vllm#17313 a bracket isn't closed",
        ),
        pytest.param(
            GrammarSpec.json_schema(_nested(5000)),
            *("SPEC_TOO_LARGE", "nest"),
            id="ggml-org/llama.cpp#25283 nested without end",
        ),
        pytest.param(
            GrammarSpec.json_schema(_nested(200)),
            *("SPEC_TOO_LARGE", "schema_depth"),
            id="ggml-org/llama.cpp#25283 nested too deeply",
        ),
        pytest.param(
            GrammarSpec.json_schema({"type": "string", "maxLength": 10**9}),
            *("SPEC_TOO_LARGE", "/maxLength"),
            id="ggml-org/llama.cpp#25746 a limit beyond all limits",
        ),
        pytest.param(
            GrammarSpec.json_schema({"$ref": "https://example.com/schema.json"}),
            *("SPEC_INVALID", "nothing is fetched"),
            id="a reference that would be fetched",
        ),
        pytest.param(
            GrammarSpec.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
            *("SPEC_INVALID", "refers to itself"),
            id="a reference to itself",
        ),
    ],
)
def test_what_hurts_is_refused(
    client: GrammarClient, spec: GrammarSpec, reason: str, says: str
) -> None:
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            client.compile(spec, BYTES)
        assert caught.value.reason == reason
        assert says in caught.value.message
        assert len(caught.value.message) < 2000
    assert accepts(client, client.compile(GrammarSpec.choice(["on"]), BYTES), "on")


HEAVY = [
    Case(
        *("a large repetition", "mlc-ai/xgrammar#368 CVE-2025-58446"),
        GrammarSpec.regex("[a-z]{2,20000}"),
        ["ab", "abc", "x" * 300],
        ["a", "A", "", "ab1"],
    ),
    Case(
        *("left recursion", "ggml-org/llama.cpp#6492"),
        GrammarSpec.ebnf('root ::= root "x" | "y"'),
        ["y", "yxx"],
        ["x", "xy", ""],
    ),
    Case(
        *("a rule that calls itself for nothing", "mlc-ai/xgrammar#250 CVE-2025-57809"),
        GrammarSpec.ebnf('root ::= part "."\npart ::= "" | [0-9]* part'),
        [".", "12."],
        ["", "a.", "1"],
    ),
    Case(
        *("some length limits take gigabytes", "dottxt-ai/outlines#658"),
        _closed({"a": {**_TEXT, "maxLength": 60}, "b": _texts(5, 100), "c": _texts(15, 30)}),
        ['{"a":"","b":[],"c":[]}', '{"a":"x","b":["y"],"c":["z","' + "z" * 30 + '"]}'],
        [
            '{"a":"' + "x" * 61 + '","b":[],"c":[]}',
            '{"a":"","b":["1","2","3","4","5","6"],"c":[]}',
            '{"a":"","b":[],"c":["' + "z" * 31 + '"]}',
        ],
    ),
    Case(
        *("lists of lists with limits", "mlc-ai/xgrammar#339"),
        _closed({
            "t": {
                "type": "array",
                "minItems": 3,
                "maxItems": 6,
                "items": {"type": "array", "minItems": 3, "maxItems": 6, "items": _TEXT},
            }
        }),
        [json.dumps({"t": [["a"] * 3] * 3}), json.dumps({"t": [["a", "b\n"] * 3] * 6})],
        [json.dumps({"t": [["a"] * 3] * 2}), json.dumps({"t": [["a"] * 7] * 3})],
    ),
    Case(
        *("an ambiguous outline", "mlc-ai/xgrammar#127"),
        GrammarSpec.ebnf(
            'root ::= item\nitem ::= name "\\n" ("\\t"+ group)?\n'
            'group ::= ("or " | "opt ") ("\\n" "\\t"+ item)+\nname ::= [a-z ]+'
        ),
        ["abc\n", "a\n\tor \n\tb\n", "a\n\t\topt \n\tb\n\tor \n\tc\n"],
        ["\n", "a", "a\n\tand \n\tb\n"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", HEAVY, ids=repr)
def test_what_is_heavy_is_bounded(own_service: ServiceProcess, case: Case) -> None:
    process = psutil.Process(own_service.pid)
    with own_service.client() as client:
        client.compile(GrammarSpec.choice(["warm"]), BYTES)
        before = process.memory_info().rss
        assert_admits(client, case)
        assert process.memory_info().rss - before < 256 * MIB
        assert client.compile(case.spec, BYTES).compile_ms < 5_000


# A compile is bounded by compile_seconds, whichever part of it takes long: here it is telling the
# branches of a oneOf apart, in 10 kB of schema.
def test_what_comes_before_a_compile_is_bounded_too() -> None:
    branches = [
        {"type": "string", "pattern": f"^[a-z]{{{number}}}(x|y)*{number}$"}
        for number in range(1, 120)
    ]
    with (
        running_service("--compile-seconds=1", "--compile-workers=1") as own,
        own.client() as client,
    ):
        client.register_tokenizer(BYTES)
        started = time.monotonic()
        with contextlib.suppress(Refused):
            client.compile(GrammarSpec.json_schema({"oneOf": branches}), BYTES)
        # The deadline, some attempts, and a slow machine.
        assert time.monotonic() - started < 6


# vllm-project/vllm#19270: a doubled star is refused, or read as a star of a star
def test_a_doubled_star(client: GrammarClient) -> None:
    with contextlib.suppress(Refused):
        grammar = client.compile(GrammarSpec.regex("ab**"), BYTES)
        assert [accepts(client, grammar, text) for text in ("a", "abb", "b")] == [True, True, False]
    assert accepts(client, client.compile(GrammarSpec.choice(["on"]), BYTES), "on")


# sgl-project/sglang#19412: ended requests are kept; #19410: so are their masks
def test_ended_sequences_leave_nothing(
    own_service: ServiceProcess, new_id: Callable[[], str]
) -> None:
    process = psutil.Process(own_service.pid)
    with own_service.client() as client:
        grammar = client.compile(OBJECT, OBJECT_TOKENS)

        def lives(count: int) -> None:
            for _ in range(count):
                row = Row(new_id(), grammar, TEXT)
                assert client.step([row]).outcomes[0] is Outcome.COMPLETE
                client.close_sequences([row.sequence_id])

        lives(500)
        before = process.memory_info().rss
        lives(2000)
        assert process.memory_info().rss - before < 16 * MIB


# sgl-project/sglang#13809: all ranks compile the same; vllm-project/vllm#49504: each request does
def test_one_compile_serves_all(
    service: ServiceProcess, client: GrammarClient, new_id: Callable[[], str]
) -> None:
    spec = _closed({new_id(): {"type": "integer"}})
    first = client.compile(spec, BYTES)
    assert not first.cached
    with service.client() as rank:
        other = rank.compile(spec, BYTES)
    assert other.cached
    assert other.id == first.id
    requests = [Request(client, grammar, new_id()) for grammar in (first, other)]
    assert requests[0].accept(*b'{"') is Outcome.OK
    assert requests[1].allowed() == [ord("{")]


# mlc-ai/xgrammar#680: the first compile for many tools takes long
def test_many_tools(client: GrammarClient) -> None:
    def tool(number: int) -> dict[str, Any]:
        arguments = {f"a{i}": {"type": ["string", "integer"][i % 2]} for i in range(10)}
        inner = {"type": "object", "properties": arguments, "additionalProperties": False}
        properties = {"name": {"const": f"tool-{number}"}, "arguments": inner}
        outer = {"type": "object", "properties": properties, "required": list(properties)}
        return {**outer, "additionalProperties": False}

    spec = GrammarSpec.json_schema({"anyOf": [tool(number) for number in range(200)]})
    good = ['{"name":"tool-0","arguments":{"a0":"x","a1":1}}', '{"name":"tool-199","arguments":{}}']
    bad = ['{"name":"tool-200","arguments":{}}', '{"name":"tool-7","arguments":{"a0":1}}']
    assert_admits(client, Case("", "", spec, good, bad))
    assert client.compile(spec, BYTES).cached


# huggingface/text-generation-inference#2200: what is in a grammar's id?
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"type":"integer","description":"a"}', '{"description":"b","type":"integer"}'),
        ('{"type":"integer","title":"n"}', '{ "type" : "integer" }'),
        (
            '{"type":"object","properties":{"a":{"type":"null","examples":[1],"default":2}}}',
            '{"properties":{"a":{"$comment":"none","type":"null"}},"type":"object"}',
        ),
        ('{"required":["a"],"properties":{"a":{}}}', '{"properties":{"a":{}},"required":["a"]}'),
    ],
)
def test_what_means_the_same_has_one_id(client: GrammarClient, one: str, other: str) -> None:
    first = client.compile(GrammarSpec.json_schema(one), BYTES)
    second = client.compile(GrammarSpec.json_schema(other), BYTES)
    assert first.id == second.id
    assert second.cached


def test_what_means_something_else_has_another_id(client: GrammarClient) -> None:
    whole = {"type": "integer"}
    named = {"a": whole, "b": whole}
    specs = [
        GrammarSpec.json_schema({**whole, "minimum": 1}),
        GrammarSpec.json_schema({**whole, "minimum": 2}),
        GrammarSpec.json_schema({**whole, "minimum": 1}, max_whitespace=0),
        GrammarSpec.json_schema({**whole, "minimum": 1}, backend="llguidance"),
        GrammarSpec.json_schema({**whole, "minimum": 1}, close_objects=True),
        GrammarSpec.json_schema({**whole, "minimum": 1}, allow_unenforced=True),
        # A property may be called like an annotation.
        GrammarSpec.json_schema({"properties": {"title": whole}}),
        GrammarSpec.json_schema({"properties": {"title": _TEXT}}),
        GrammarSpec.json_schema({"properties": {}}),
        # The order of properties is the order of keys.
        GrammarSpec.json_schema({"properties": named}),
        GrammarSpec.json_schema({"properties": dict(reversed(named.items()))}),
        # So is what an enum or a const holds.
        GrammarSpec.json_schema({"const": {"title": 1}}),
        GrammarSpec.json_schema({"const": {"title": 2}}),
        GrammarSpec.regex("a"),
        GrammarSpec.choice(["a"]),
        GrammarSpec.choice(["a", "b"]),
        GrammarSpec.choice(["b", "a"]),
    ]
    ids = [client.compile(spec, BYTES).id for spec in specs]
    assert len({*ids}) == len(ids)
    # vllm-project/vllm#7557: a tokenizer is its content, not an object
    again = toy(list(BYTES.tokens), stop=BYTES.stop_token_ids)
    assert client.compile(specs[0], again).id == ids[0]
    wider = toy(list(BYTES.tokens), stop=BYTES.stop_token_ids, width=300)
    assert client.compile(specs[0], wider).id != ids[0]


# vllm-project/vllm#50966: each constraint is enforced, listed or refused, however many there are
@pytest.mark.parametrize("names", [["x" * 20_000], [f"n{i}" for i in range(500)]], ids=len)
def test_a_long_refusal_arrives(client: GrammarClient, names: list[str]) -> None:
    properties = {name: {"uniqueItems": True} for name in names}
    with pytest.raises(Refused) as caught:
        client.compile(GrammarSpec.json_schema({"properties": properties}), BYTES)
    assert caught.value.reason == "SPEC_UNENFORCED"
    assert f"/properties/{names[0]}"[:500] in caught.value.message
    assert caught.value.unenforced[0].keyword == "uniqueItems"


# vllm-project/vllm#55152: a backend that doesn't know the newer tags fails on a missing key
@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_a_tag_for_a_backend_without_tags(client: GrammarClient, backend: str) -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
    with pytest.raises(Refused) as caught:
        client.compile(GrammarSpec.structural_tag(tag, backend=backend), BYTES)
    assert caught.value.reason == "SPEC_UNSUPPORTED"
    assert "xgrammar" in caught.value.message


# vllm-project/vllm#53745: what is strict, and can't be, is an error and not a free text
def test_nothing_is_free_that_was_to_be_bound(client: GrammarClient) -> None:
    schema = {"type": "object", "properties": {"a": {"contains": {"const": 1}}}}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    for spec in (
        GrammarSpec.json_schema(schema),
        GrammarSpec.structural_tag({"type": "structural_tag", "format": tag}),
    ):
        with pytest.raises(Refused) as caught:
            client.compile(spec, BYTES)
        assert caught.value.reason == "SPEC_UNENFORCED"
        assert [item.keyword for item in caught.value.unenforced] == ["contains"]


# vllm-project/vllm#46575: how long a compile takes is told, to each caller
def test_a_compile_tells_its_time(client: GrammarClient, new_id: Callable[[], str]) -> None:
    started = time.perf_counter()
    grammar = client.compile(_closed({new_id(): _TEXT}), BYTES)
    assert 0 < grammar.compile_ms < (time.perf_counter() - started) * 1000
