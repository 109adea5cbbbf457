"""Keys in any order: what is valid is taken however its keys are ordered, and nothing else is."""

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from grammar_service.errors import Invalid
from grammar_service.grammars.schema import Rules, check, forms, rewrite
from tests.grammars.schema.texts import Refused, Texts

_I: dict[str, Any] = {"type": "integer"}
_S: dict[str, Any] = {"type": "string"}


def _texts(schema: Any) -> Texts:
    """The texts of a schema, which has a form in rules."""
    form = forms(rewrite(schema, check(schema)).schema, "llguidance")[0]
    assert isinstance(form, Rules)
    return Texts(form, "llguidance")


def _dump(members: Any) -> str:
    """An object of members, which may have a key twice."""
    parts = (f"{json.dumps(key, ensure_ascii=False)}:{json.dumps(value)}" for key, value in members)
    return "{" + ",".join(parts) + "}"


_PAIR = {"type": "object", "properties": {"a": _I, "o": _S, "b": _I}, "required": ["a", "b"]}


@pytest.mark.parametrize("closed", [True, False])
def test_required_keys_come_anywhere_between_others(closed: bool) -> None:
    texts = _texts({**_PAIR, "additionalProperties": not closed})
    members = [("a", 1), ("b", 2), ("o", "x"), ("x", None), ("y", [{}])][: 3 if closed else 5]
    for order in itertools.permutations(members):
        assert texts.accepts(_dump(order)), order
        for missing in ("a", "b"):
            assert not texts.accepts(_dump(m for m in order if m[0] != missing)), order
    assert texts.accepts('{"x":1,"b":1,"x":2,"a":1}') != closed


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"b":1,"a":1}',
        '{"a":1,"o":"x","b":1,"o":"x"}',
        '{"b":1,"a":"1"}',
        '{"o":1,"b":1,"a":1}',
        '{"a":1,"b":1,"\\u0061":"x"}',
        '{"\\u006f":1,"a":1,"b":1}',
        '{"\\u0061":1,"b":1}',
        '{"a":1,"b":1,}',
        '{,"a":1,"b":1}',
        '{"a":1"b":1}',
        "{}",
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_no_key_comes_twice_or_in_disguise(text: str, closed: bool) -> None:
    assert not _texts({**_PAIR, "additionalProperties": not closed}).accepts(text)


_NODE = {
    "type": "object",
    "properties": {"name": _S, "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["name", "parts"],
}
_CASES: list[tuple[str, Any, list[str], list[str]]] = [
    ("nested", {"type": "object", "properties": {"in": _PAIR, "n": _I}, "required": ["in"]},
     ['{"n":1,"in":{"b":1,"o":"","a":1}}', '{"in":{"x":0,"a":1,"b":1},"n":1}'],
     ['{"n":1}', '{"n":1,"in":{"b":1,"o":""}}']),
    ("recursive", {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
     ['{"parts":[],"name":""}', '{"x":1,"parts":[{"parts":[],"name":""}],"name":""}'],
     ['{"parts":[{"parts":[]}],"name":""}', '{"parts":[1],"name":""}']),
    ("array", {"type": "array", "items": _PAIR, "minItems": 1, "maxItems": 2},
     ['[{"b":1,"a":1}]', '[{"b":1,"a":1},{"x":1,"a":1,"b":1}]'],
     ["[]", "[" + ",".join(['{"a":1,"b":1}'] * 3) + "]", '[{"b":1}]']),
    ("at least", {"type": "array", "items": _PAIR, "minItems": 2},
     ["[" + ",".join(['{"b":1,"a":1}'] * n) + "]" for n in (2, 5)], ['[{"b":1,"a":1}]', "[]"]),
    ("at most", {"type": "array", "items": _PAIR, "maxItems": 1},
     ["[]", '[{"b":1,"a":1}]'], ["[" + ",".join(['{"b":1,"a":1}'] * 2) + "]"]),
    ("alternatives", {"anyOf": [_PAIR, {"type": "null"}, {"type": "object", "required": ["z"]}]},
     ["null", '{"b":1,"a":1}', '{"a":"x","z":1}'], ['{"b":1,"a":"x"}', "1"]),
    ("types", {"type": ["object", "array", "null"], "properties": {"a": _I}, "required": ["a"],
               "items": _I},
     ["null", "[1]", '{"x":1,"a":1}'], ['{"x":1}', '["x"]', "1"]),
    ("map", {"type": "object", "additionalProperties": _PAIR},
     ["{}", '{"x":{"b":1,"a":1},"y":{"a":1,"b":1}}'], ['{"x":{"b":1}}']),
    ("patterns", {"type": "object", "required": ["n1", "a"], "additionalProperties": False,
                  "properties": {"a": _S}, "patternProperties": {"^n[0-9]$": _I, "^s": _S}},
     ['{"n2":1,"a":"","n1":2,"s":""}', '{"a":"","n1":2}'],
     ['{"n2":1,"a":""}', '{"a":"","n1":""}', '{"a":"","n1":1,"n1":1}', '{"a":"","n1":1,"x":1}',
      '{"a":"","n1":1,"\\u006e1":1}', '{"a":"","n1":1,"s":1}']),
    ("forbidden", {"type": "object", "properties": {"a": _I, "b": False}, "required": ["a"]},
     ['{"x":1,"a":1}'], ['{"b":1,"a":1}', '{"a":1,"\\u0062":1}']),
    ("all optional", {"type": "object", "properties": {"a": _I, "b": _I}},
     ["{}", '{"b":1}', '{"b":1,"x":1,"a":1}'], ['{"b":1,"b":1}', '{"b":"x"}']),
    # What can't be a rule stays a schema within the rules.
    ("counted", {"type": "object", "properties": {"in": {**_PAIR, "maxProperties": 2}},
                 "required": ["in"]},
     ['{"x":1,"in":{"a":1,"b":1}}'], ['{"in":{"a":1,"b":1,"x":1}}', '{"x":1}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "taken", "refused"), [case[1:] for case in _CASES],
                         ids=[case[0] for case in _CASES])  # fmt: skip
def test_around_objects(schema: Any, taken: list[str], refused: list[str]) -> None:
    texts = _texts(schema)
    assert [text for text in taken if not texts.accepts(text)] == []
    assert [text for text in refused if texts.accepts(text)] == []


@pytest.mark.parametrize(
    "name", ['"', "\\", "\n", "\x01", "é", "𝄞", "", "a b", "%json {", "x" * 99]
)
def test_odd_names(name: str) -> None:
    texts = _texts({"type": "object", "properties": {name: _I, "b": _I}, "required": [name]})
    assert texts.accepts(_dump([("x", ""), ("b", 1), (name, 1)]))
    assert not texts.accepts(_dump([("x", ""), (name, "")]))
    assert not texts.accepts(_dump([("x", ""), ("b", 1)]))
    for spelled in {f"\\u{ord(c):04x}" for c in name[:1]} | {f"\\u{ord(c):04X}" for c in name[:1]}:
        key = spelled + json.dumps(name[1:], ensure_ascii=False)[1:-1]
        if f'"{key}"' != json.dumps(name, ensure_ascii=False):
            assert not texts.accepts('{"' + key + '":"",' + _dump([(name, 1)])[1:])


@pytest.mark.parametrize("required", [0, 1, 3, 64])
def test_no_text_leads_to_a_dead_end(required: int) -> None:
    """A comma after the last key of a closed object would."""
    names = [f"k{number}" for number in range(max(required, 3))]
    schema = {
        "type": "object",
        "properties": {name: {"enum": [1, {}]} for name in names},
        "required": names[:required],
        "additionalProperties": False,
    }
    texts = _texts({"type": "array", "items": schema})
    chance = random.Random(7)
    for _ in range(20):
        texts.walk(chance, 3000 if required == 64 else 300)


@pytest.mark.parametrize("count", [64, 65])
def test_many_required_keys(count: int) -> None:
    """Past the bits of a rule the order is fixed, and all else holds."""
    keys = [f"k{i}" for i in range(count)]
    texts = _texts({"type": "object", "properties": dict.fromkeys(keys, _I), "required": keys})
    assert texts.accepts(_dump((key, 1) for key in keys))
    assert texts.accepts(_dump((key, 1) for key in reversed(keys))) == (count == 64)
    assert not texts.accepts(_dump((key, 1) for key in keys[:-1]))


def test_long_objects_are_no_burden() -> None:
    members = [(f"x{i}", i) for i in range(5000)]
    assert _texts(_PAIR).accepts(_dump([*members, ("b", 1), *members, ("a", 1), *members]))


def _tool(number: int, keys: int) -> Any:
    inner = {"type": "object", "properties": {f"{number}-{i}": _I for i in range(keys)}}
    properties = {"name": {"const": f"t{number}"}, "in": {**inner, "required": [f"{number}-0"]}}
    return {"type": "object", "properties": properties, "required": ["name", "in"]}


@pytest.mark.parametrize("count", [10, 100])
def test_many_objects_side_by_side_have_fewer_orders(count: int) -> None:
    """Each of them costs time at each step, until a value tells which it is."""
    texts = _texts({"anyOf": [_tool(number, 10) for number in range(count)]})
    assert texts.accepts('{"name":"t7","in":{"7-0":1}}')
    assert texts.accepts('{"in":{"7-0":1},"name":"t7"}') == (count == 10)
    assert not texts.accepts('{"name":"t7","in":{"8-0":1}}')


def test_a_large_schema_has_the_plain_forms_only() -> None:
    properties = {f"p{i}": {"type": "string", "pattern": f"^{'x' * 900}{i}$"} for i in range(400)}
    found = forms({"type": "object", "properties": properties}, "llguidance")
    assert not any(isinstance(form, Rules) for form in found)


_names = st.sampled_from(["a", "b", "ab", 'q"', "é"])
_leaves = st.sampled_from([_I, _S, {"type": "null"}, {"enum": [1, "a", None]}, True])


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(_names, inner, max_size=4)},
        optional={
            "required": st.lists(_names, max_size=3, unique=True),
            "additionalProperties": st.one_of(st.booleans(), inner),
        },
    )
    count = st.integers(0, 2)
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner}, optional={"minItems": count, "maxItems": count}
    )
    alternatives = st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=2, max_size=2)})
    references = st.just({"$ref": "#/$defs/one"})
    return st.one_of(objects, objects, objects, arrays, alternatives, references)


_schemas = st.recursive(_leaves, _objects, max_leaves=8)
_keys = st.one_of(_names, st.sampled_from(["x", "abc", ""]))
_values = st.recursive(
    st.sampled_from([1, "a", None]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_keys, inner, min_size=1, max_size=5)
    ),
    max_leaves=8,
)


@given(schema=_objects(_schemas), one=_schemas, values=st.lists(_values, min_size=8, max_size=16))
@settings(max_examples=400, deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
def test_rules_take_what_is_valid_and_nothing_else(
    schema: Any, one: Any, values: list[Any]
) -> None:
    schema = {**schema, "$defs": {"one": one}}
    try:
        texts = _texts(schema)
    except (Invalid, Refused, AssertionError):
        assume(False)  # a reference to itself, nothing satisfies it, or no object is in it
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        assert texts.accepts(text) == validator.is_valid(value), text
