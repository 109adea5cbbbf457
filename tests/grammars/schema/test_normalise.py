"""Equal meaning, equal text; other meaning, other text; and equal text, equal plan."""

import json
from typing import Any

import pytest

from engine_client import GrammarSpec
from grammar_service.grammars.plan import plan
from grammar_service.grammars.schema import Limits, normalise
from grammar_service.grammars.spec import canonical, grammar_id


def _text(schema: Any) -> str:
    return json.dumps(normalise(schema))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"type": "integer", "description": "a"}, {"description": "b", "type": "integer"}),
        ({"type": "string", "x-order": 1, "examples": ["a"]}, {"type": "string"}),
        ({"properties": {"a": {"title": "A"}}}, {"properties": {"a": {}}}),
        (
            {"$defs": {"a": {"title": "A"}}, "$ref": "#/$defs/a"},
            {"$ref": "#/$defs/a", "$defs": {"a": {}}},
        ),
    ],
)
def test_same(one: Any, two: Any) -> None:
    assert _text(one) == _text(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 2}),
        ({"properties": {"a": {}, "b": {}}}, {"properties": {"b": {}, "a": {}}}),
        ({"properties": {"title": {"type": "string"}}}, {"properties": {}}),
        ({"enum": [{"title": "a"}]}, {"enum": [{}]}),
        ({"const": {"description": 1}}, {"const": {}}),
        ({"log": {"type": "string"}, "$ref": "#/log"}, {"log": {"type": "null"}, "$ref": "#/log"}),
        ({"format": "date"}, {"format": "time"}),
        *(
            ({"$id": "u:s", "$ref": ref, "log": {"a": {"type": kind}}}, {"$id": "u:s", "$ref": ref})
            for ref in ("u:s#/log/a", "#%2Flog/a", "#/%6Cog/a", "#/log/a")
            for kind in ("string", "integer")
        ),
    ],
)
def test_other(one: Any, two: Any) -> None:
    assert _text(one) != _text(two)


_I = {"type": "integer"}
_TWO_ORDERS: list[tuple[Any, Any]] = [
    (
        {"type": "object", "properties": {"b": _I}, "allOf": [{"properties": {"a": _I}}]},
        {"allOf": [{"properties": {"a": _I}}], "properties": {"b": _I}, "type": "object"},
    ),
    (
        {"properties": {"b": _I}, "$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": _I}}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": _I}}}, "properties": {"b": _I}},
    ),
    (
        {"title": "t", "anyOf": [{"maximum": 3, "type": "integer"}, {"type": "string"}]},
        {"anyOf": [{"type": "integer", "maximum": 3}, {"type": "string"}]},
    ),
]


@pytest.mark.parametrize(("one", "two"), _TWO_ORDERS)
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "outlines"])
@pytest.mark.parametrize("fixed", [False, True])
def test_one_id_is_one_plan(one: Any, two: Any, backend: str, fixed: bool) -> None:
    specs = [
        canonical(GrammarSpec.json_schema(each, backend=backend, fixed_key_order=fixed), 10_000)
        for each in (one, two)
    ]
    assert grammar_id(specs[0], "t", "v") == grammar_id(specs[1], "t", "v")
    assert plan(specs[0], Limits()).attempts == plan(specs[1], Limits()).attempts
