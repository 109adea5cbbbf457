"""What a schema admits: reduced public reports. A text is accepted to the end, or isn't.

The vocabulary is the 256 bytes and an end token, so that a text is its bytes.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from engine_client import Grammar, GrammarClient, GrammarSpec, Outcome, Refused, Row
from tests.cases import Request
from tests.support import toy

BYTES = toy([*(bytes([byte]) for byte in range(256)), "<eos>"], stop=[256])
_AT_ONCE = 128
_NUMBERS = itertools.count()


class Case(NamedTuple):
    """A spec, texts that it admits, texts that it doesn't, and the report that it comes from."""

    symptom: str
    report: str
    spec: GrammarSpec
    accepted: list[str]
    rejected: list[str]

    def __repr__(self) -> str:
        return f"{self.report} {self.symptom}"


def accepts(client: GrammarClient, grammar: Grammar, text: str) -> bool:
    """Whether the masks admit each byte of a text, and the end after it."""
    tokens, sequence_id = list(text.encode()), f"text-{next(_NUMBERS)}"
    try:
        for start in range(0, len(tokens), _AT_ONCE):
            drafts = tokens[start : start + _AT_ONCE]
            result = client.step([Row(sequence_id, grammar, tokens[:start], drafts=drafts)])
            assert result.outcomes[0] is not Outcome.FAILED, result.notes
            if result.legal_drafts[0] < len(drafts):
                return False
        return client.step([Row(sequence_id, grammar, tokens)]).outcomes[0] is Outcome.COMPLETE
    finally:
        client.close_sequences([sequence_id])


def assert_admits(client: GrammarClient, case: Case) -> None:
    """The grammar of a case admits the texts that it should, and none of the others."""
    grammar = client.compile(case.spec, BYTES)
    wrong = [text for text in case.accepted if not accepts(client, grammar, text)]
    assert wrong == [], f"{grammar.backend} rejects"
    wrong = [text for text in case.rejected if accepts(client, grammar, text)]
    assert wrong == [], f"{grammar.backend} accepts"


def _schema(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec.json_schema(schema)


def _object(required: dict[str, Any], **more: Any) -> GrammarSpec:
    """A closed object, all of whose properties are required."""
    closed = {"type": "object", "properties": required, "required": list(required)}
    return _schema({**closed, "additionalProperties": False, **more})


_STARS = {"type": "integer", "minimum": 1, "maximum": 5}
_LONG = {"type": "string", "maxLength": 10_000}
_BASE = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 10}}}
_LIST = {"type": "array", "items": {"$ref": "#/definitions/part"}}
_PART = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"^(\{[\w\-]+\})|([\w\-]+)$"},
        "parts": {"$ref": "#/definitions/list"},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_ADDRESS = {"type": "string", "pattern": r"^[a-z]+@[a-z]+\.org$"}

CASES = [
    Case(
        *("a length limit next to a pattern is dropped", "mlc-ai/xgrammar#895"),
        _object({"id": {"type": "string", "pattern": "^[a-f]+$", "maxLength": 4}}),
        ['{"id":"a"}', '{"id":"abcd"}'],
        ['{"id":"abcde"}', '{"id":"AB"}', '{"id":""}'],
    ),
    Case(
        *("one of pattern and minLength is dropped", "sgl-project/sglang#37707"),
        _schema({"type": "string", "pattern": "^[0-9]*$", "minLength": 3}),
        ['"123"', '"1234"'],
        ['"12"', '""', '"abc"'],
    ),
    Case(
        *("the limit is dropped in items only", "vllm-project/vllm#45592"),
        _schema({
            "type": "array",
            "items": {"type": "string", "pattern": r"^[\x20-\x7E]+$", "maxLength": 5},
            "minItems": 1,
        }),
        ['["five!"]', '["a","b c"]'],
        ['["sixsix"]', '["a","sixsix"]', "[]", '["é"]'],
    ),
    Case(
        *("allOf of two enforces neither", "vllm-project/vllm#56556"),
        _schema({
            "$defs": {"Base": {**_BASE, "required": ["n"]}},
            "allOf": [
                {"$ref": "#/$defs/Base"},
                {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]},
            ],
        }),
        ['{"n":10,"s":"a"}', '{"n": 11, "s": ""}'],
        ['{"n":9,"s":"a"}', '{"n":10}', '{"s":"a"}', "[]", "{}"],
    ),
    Case(
        *("an object that says nothing else isn't compiled", "mlc-ai/xgrammar#256"),
        _schema({"type": "object"}),
        ["{}", '{"x":-1.5e3,"y":[false,null,{}]}'],
        ["[]", "0", '"{}"', "null"],
    ),
    Case(
        *("nothing between 0 and 1 is above 0", "mlc-ai/xgrammar#661"),
        _schema({"type": "number", "exclusiveMinimum": 0}),
        ["0.1", "0.001", "7", "20.5"],
        ["0", "-1", "-0.1"],
    ),
    Case(
        *("a minimum without a maximum is passed below", "mlc-ai/xgrammar#661"),
        _schema({"type": "integer", "minimum": 3}),
        ["3", "4", "10", "299"],
        ["2", "0", "-3", "-30"],
    ),
    Case(
        *("a fraction passes the maximum", "mlc-ai/xgrammar#661"),
        _schema({"type": "number", "minimum": -1, "maximum": 4}),
        ["-1", "0", "3.75", "4"],
        ["4.2", "-1.5", "5", "40"],
    ),
    Case(
        *("an optional key out of order escapes its schema", "guidance-ai/guidance#1039"),
        _schema({
            "type": "object",
            "properties": {"a": {"const": "one"}, "b": {"const": "two"}},
            "required": ["b"],
        }),
        ['{"a":"one","b":"two"}', '{"b":"two"}'],
        ['{"b":"two","a":"BAD"}', '{"a":"one"}', '{"b":"one"}'],
    ),
    Case(
        *("a control character in a key is pasted as it is", "mlc-ai/xgrammar#655"),
        _object({"x\u0001y": {"type": "integer"}}),
        ['{"x\\u0001y":1}'],
        ['{"x\u0001y":1}', '{"xy":1}'],
    ),
    Case(
        *("patternProperties end in white space", "guidance-ai/llguidance#265"),
        _object(
            {
                "level": {"type": "integer", "multipleOf": 5},
                "tags": {"type": "array", "items": {"type": "string", "minLength": 2}},
            },
            patternProperties={"^level$": {"type": "integer"}},
        ),
        ['{"level":5,"tags":["ab"]}', '{"level":20,"tags":[]}'],
        ['{"level":6,"tags":[]}', '{"level":5,"tags":["a"]}', '{"level":5,"tags":[],"z":1}'],
    ),
    Case(
        *("integer bounds are ignored", "vllm-project/vllm#12028"),
        _object({"where": {"type": "string"}, "n": _STARS}),
        ['{"where":"park","n":1}', '{"where":"","n":5}'],
        ['{"where":"park","n":0}', '{"where":"park","n":6}', '{"where":"park","n":55}'],
    ),
    Case(
        *("items as a list, as draft 7 has it, is fatal", "vllm-project/vllm-ascend#11588"),
        _schema({
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "integer"}, {"type": "string"}],
        }),
        ['[1,"x"]', "[1]", "[]"],
        ['["x",1]', "[1,2]"],
    ),
    Case(
        *("no backslash in strings, so no quote", "dottxt-ai/outlines#935"),
        _object({"said": {"type": "string"}}),
        [r'{"said":"\"hi\", he said"}', r'{"said":"c:\\d"}'],
        ['{"said":""hi""}', '{"said":"\\"}'],
    ),
    # The reports have two more texts, "\u0041" and "\/": see the narrowings below.
    Case(
        *("escapes", "dottxt-ai/outlines-core#231"),
        _schema({"type": "string"}),
        [r'"a\nb"', r'"\t\r\b\f"', r'"\\\""'],
        ['"a\\', r'"\x41"', '"a\nb"', r'"\u00"'],
    ),
    Case(
        *("strings in containers lose their quotes", "dottxt-ai/outlines#1962"),
        _schema({"type": "array", "items": _ADDRESS, "minItems": 1}),
        ['["a@b.org"]', '["a@b.org","cc@dd.org"]'],
        ["[a@b.org]", "[]", '["a@b.com"]'],
    ),
    Case(
        *("keys twice, required ones missing", "mlc-ai/xgrammar#668"),
        _object({"name": {"type": "string"}, "age": {"type": "integer"}}),
        ['{"name":"a","age":1}'],
        ['{"name":"a","name":"b"}', '{"name":"a","age":1,"age":2}', '{"name":"a"}', "{}"],
    ),
    Case(
        *("white space without end", "vllm-project/vllm#38696"),
        _object({"a": {"type": "integer"}}),
        ['{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{"a":' + " " * 8 + "1}"],
        ['{"a":}', '{"a":' + " \n" * 64 + "1}", '{"a":' + " " * 9 + "1}"],
    ),
    Case(
        *("one layout only, so lists stay empty", "sgl-project/sglang#2216"),
        _object({"u": {"type": "array", "items": {"type": "string"}}}),
        ['{"u": ["a", "b"]}', '{"u":["a","b"]}', '{\n  "u": [\n    "a",\n    "b"\n  ]\n}'],
        ['{"u":"a"}', '{"u":["a" "b"]}'],
    ),
    Case(
        *("a large limit makes all tools unusable", "ggml-org/llama.cpp#25746"),
        _object({"body": _LONG}),
        ['{"body":"hello"}', '{"body":"' + "x" * 10_000 + '"}'],
        ['{"body":1}', '{"body":"' + "x" * 10_001 + '"}'],
    ),
    Case(
        *("how many items is not heard", "dottxt-ai/outlines#342"),
        _schema({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}),
        ["[1,2]", "[1, 2, 3]"],
        ["[1]", "[1,2,3,4]", "[]"],
    ),
    Case(
        *("recursion and a pattern of two branches crash", "mlc-ai/xgrammar#207"),
        _object(
            {"parts": {"$ref": "#/definitions/list"}}, definitions={"list": _LIST, "part": _PART}
        ),
        ['{"parts":[{"name":"{id}"},{"name":"a-b","parts":[]}]}', '{"parts":[]}'],
        ['{"parts":[{"name":""}]}', '{"parts":[{}]}', '{"parts":[{"name":"a","z":1}]}'],
    ),
    *(
        Case(
            *(f"a pattern repeats {most} times", "mlc-ai/xgrammar#863"),
            _schema({"type": "string", "pattern": rf"^[^\n\r]{{1,{most}}}$"}),
            ['"x"', f'"{"y" * most}"'],
            ['""', f'"{"y" * (most + 1)}"'],
        )
        for most in (127, 128, 129, 256)
    ),
    # 1.0 is an integer by the standard; no mask allows it, which is less and not more.
    Case(
        *("integers aren't fractions", "guidance-ai/guidance#1023"),
        _schema({"type": "integer", "minimum": 0, "maximum": 20}),
        ["0", "20", "7"],
        ["1.5", "21", "-1"],
    ),
    Case(
        *("texts beyond ASCII", "(recalled)"),
        _schema({"enum": ["京都", "garçon", "😀", 'x"y\\z']}),
        ['"京都"', '"garçon"', '"😀"', r'"x\"y\\z"'],
        ['"京"', '"garcon"', '"x"y"', '""'],
    ),
    Case(
        *("a pattern that another language can't parse", "ggml-org/llama.cpp#19051"),
        _schema({"type": "string", "pattern": r"^bye\!$"}),
        ['"bye!"'],
        ['"bye"', '"bye\\!"', '"hi!"'],
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_schema_admits_what_it_says(client: GrammarClient, case: Case) -> None:
    assert_admits(client, case)


# The masks may allow less than the schema, never more: these mean what is allowed in another
# spelling or order, and each is rejected or the very same value.
@pytest.mark.parametrize(
    ("spec", "allowed", "narrowed"),
    [
        pytest.param(_schema({"type": "string"}), r'"\tA"', r'"\t\u0041"', id="\\u for ASCII"),
        pytest.param(_schema({"type": "string"}), '"/"', r'"\/"', id="escaped slash"),
        pytest.param(_schema({"enum": ["京"]}), '"京"', r'"\u4eac"', id="\\u for others"),
        pytest.param(_schema({"type": "integer", "maximum": 9}), "1", "1.0", id="1.0"),
        pytest.param(
            _object({"name": {"type": "string"}, "age": {"type": "integer"}}),
            *('{"name":"a","age":1}', '{"age":1,"name":"a"}'),
            id="required keys in another order",
        ),
    ],
)
def test_less_is_allowed_and_never_more(
    client: GrammarClient, spec: GrammarSpec, allowed: str, narrowed: str
) -> None:
    grammar = client.compile(spec, BYTES)
    assert accepts(client, grammar, allowed)
    assert json.loads(allowed) == json.loads(narrowed)
    accepts(client, grammar, narrowed)  # either will do; it is a legal text
    assert not accepts(client, grammar, narrowed[:-1] + "x")


# mlc-ai/xgrammar#831: a declared key out of order can't be closed, so the output derails
def test_a_declared_key_out_of_order_has_a_way_on(
    client: GrammarClient, new_id: Callable[[], str]
) -> None:
    number = {"type": "integer"}
    properties = {"a": number, "b": number}
    spec = _schema({"type": "object", "properties": properties, "additionalProperties": True})
    assert_admits(
        client,
        Case(
            *("", "", spec),
            ['{"a":1,"b":2}', '{"b":1}', '{"b":1,"c":"x"}', '{"b":1,"a":2}'],
            ['{"a":"x"}', '{"b":1,"a":"x"}'],
        ),
    )
    request = Request(client, client.compile(spec, BYTES), new_id())
    if request.accept(*b'{"b":1,"a') is Outcome.OK:
        assert ord('"') in request.allowed()


# dottxt-ai/outlines-core#231: an escape in two tokens is refused
def test_an_escape_may_span_tokens(client: GrammarClient, new_id: Callable[[], str]) -> None:
    tokens = toy(['"a\\', 'nb"', '"', "a", "\\", "n", "b", "<eos>"], stop=[7])
    grammar = client.compile(_schema({"type": "string"}), tokens)
    for text in ([0, 1], [2, 3, 4, 1], [0, 5, 6, 2], [2, 3, 4, 5, 6, 2]):
        request = Request(client, grammar, new_id())
        for token in text:
            assert token in request.allowed()
            request.accept(token)
        assert request.allowed() == [7]


# smg-project/smg#2392: definitions stay behind when a tool's schema is cut out
def test_definitions_of_a_tool_come_with_it(client: GrammarClient) -> None:
    node = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
    schema = {
        "$defs": {"Node": {**node, "additionalProperties": False}},
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/Node"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": tag})
    accepted = ['<call>{"n":{"v":1}}</call>', '<call>{"n": {"v": 20}}</call>']
    rejected = ['<call>{"n":{"v":"x"}}</call>', '<call>{"n":5}</call>', '<call>{"n":{}}</call>']
    assert_admits(client, Case("", "", spec, accepted, rejected))


# What no backend enforces is refused by name.
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        # vllm-project/vllm#12131: unique items among the gaps
        ({"items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3}, [("", "uniqueItems")]),
        # vllm-project/vllm#50966: every constraint is enforced, listed or refused
        (
            {"properties": {"a/b": {"not": {"const": 1}, "uniqueItems": True}}},
            [("/properties/a~1b", "uniqueItems"), ("/properties/a~1b", "not")],
        ),
    ],
)
def test_what_is_not_enforced_is_named(
    client: GrammarClient, schema: dict[str, Any], named: list[tuple[str, str]]
) -> None:
    for _ in range(2):  # the same answer each time
        with pytest.raises(Refused) as caught:
            client.compile(_schema(schema), BYTES)
        assert caught.value.reason == "SPEC_UNENFORCED"
        assert {*caught.value.unenforced} <= {*named}
        assert named[0] in caught.value.unenforced
        assert named[0][1] in caught.value.message
    grammar = client.compile(GrammarSpec.json_schema(schema, allow_unenforced=True), BYTES)
    # The backend that takes it may enforce less than the best one, and says so.
    assert {*caught.value.unenforced} <= {*grammar.unenforced}
