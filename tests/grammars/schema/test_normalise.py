"""Equal meaning, equal text; other meaning, other text."""

import json
from typing import Any

import pytest

from grammar_service.grammars.schema import normalise


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
    ],
)
def test_other(one: Any, two: Any) -> None:
    assert _text(one) != _text(two)
