"""Rewrites keep the meaning: what a schema accepts, it accepts rewritten, and nothing else."""

from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from grammar_service.errors import Invalid
from grammar_service.grammars.schema import check, rewrite
from tests.grammars.schema.strategies import schemas, values

_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@given(schema=schemas(), instances=st.lists(values, min_size=5, max_size=12))
@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=_SLOW)
def test_random_schemas_mean_the_same(schema: Any, instances: list[Any]) -> None:
    try:
        dialect = check(schema)
    except Invalid:
        assume(False)
    rewritten = rewrite(schema, dialect)
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(rewritten.schema)
    for instance in instances:
        assert before.is_valid(instance) == after.is_valid(instance), (instance, rewritten.schema)


_CASES: list[tuple[str, Any, Any]] = [
    ("allOf", {"allOf": [{"type": "object", "properties": {"a": {"minimum": 1}}, "required": ["a"]},
                         {"properties": {"a": {"maximum": 3}}, "required": ["b"]}]},
     {"type": "object", "properties": {"a": {"minimum": 1, "maximum": 3}, "b": True},
      "required": ["a", "b"]}),
    ("oneOf of types", {"oneOf": [{"type": "string"}, {"type": "null"}]},
     {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ("counts with a point", {"type": "array", "minItems": 1.0, "contains": True, "maxItems": 2e0},
     {"type": "array", "minItems": 1, "maxItems": 2}),
    ("items that may be", {"allOf": [{"type": "array", "prefixItems": [{"type": "null"}]},
                                     {"items": True}], "unevaluatedItems": False},
     {"type": "array", "prefixItems": [{"type": "null"}], "items": True}),
    ("const", {"const": 1}, {"enum": [1]}),
    ("enum beside type", {"type": "string", "enum": ["a", 1, None]}, {"enum": ["a"]}),
    ("enum beside bounds", {"enum": [1, 5], "maximum": 3}, {"enum": [1]}),
    ("not of a type", {"type": ["string", "null"], "not": {"type": "null"}}, {"type": "string"}),
    ("not of an enum", {"enum": ["a", "b"], "not": {"const": "a"}}, {"enum": ["b"]}),
    ("not of required", {"type": "object", "not": {"required": ["a"]}},
     {"type": "object", "properties": {"a": False}}),
    ("contains anything", {"type": "array", "contains": True}, {"type": "array", "minItems": 1}),
    ("lone branch", {"anyOf": [{"type": "string"}, False]}, {"type": "string"}),
    ("other types", {"type": "string", "minimum": 3, "items": {}}, {"type": "string"}),
    ("unevaluated", {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
     {"type": "object", "properties": {"a": {}}, "additionalProperties": False}),
    ("a reference beside keywords",
     {"$defs": {"n": {"type": "integer", "minimum": 1}}, "$ref": "#/$defs/n", "maximum": 3},
     {"type": "integer", "minimum": 1, "maximum": 3}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}},
     {"anyOf": [{"type": "object", "properties": {"a": False}},
                {"type": "object", "properties": {"a": True, "b": True}, "required": ["a", "b"]}]}),
    ("counts that hold", {"type": "object", "required": ["a"], "minProperties": 1},
     {"type": "object", "properties": {"a": True}, "required": ["a"]}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), [case[1:] for case in _CASES],
                         ids=[case[0] for case in _CASES])  # fmt: skip
def test_a_rewrite(schema: Any, expected: Any) -> None:
    assert rewrite(schema, check(schema)).schema == rewrite(expected, 2020).schema
    found = rewrite(schema, check(schema)).schema
    assert not {"oneOf", "not", "const", "$defs"} & set(found)


_DRAFTS: list[tuple[Any, int, Any]] = [
    ({"minimum": 1, "exclusiveMinimum": True}, 4, {"exclusiveMinimum": 1}),
    ({"items": [{"type": "string"}], "additionalItems": False}, 2019,
     {"prefixItems": [{"type": "string"}], "items": False}),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a",
      "maxLength": 1, "definitions": {"a": {"type": "string"}}}, 7,
     {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "dialect", "expected"), _DRAFTS)
def test_older_drafts_are_read_as_they_were_meant(schema: Any, dialect: int, expected: Any) -> None:
    assert check(schema) == dialect
    assert rewrite(schema, dialect).schema == expected


def test_objects_are_closed_that_do_not_say_what_else_they_take() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "object", "additionalProperties": True},
            "b": {},
            "c": {"type": "object"},
        },
    }
    closed = rewrite(schema, 2020, close_objects=True).schema
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is True
    assert closed["properties"]["b"] is True
    assert closed["properties"]["c"] == {"type": "object"}


def test_pointers_lead_into_the_original() -> None:
    schema = {
        "allOf": [{"properties": {"x": {"type": "array", "uniqueItems": True}}}, {"type": "object"}]
    }
    rewritten = rewrite(schema, 2020)
    assert rewritten.origin("/properties/x") == "/allOf/0/properties/x"
