"""What is refused before any library sees it, and what is let pass although it is odd."""

from typing import Any

import pytest

from grammar_service.errors import Invalid
from grammar_service.grammars.schema import Limits, check


def _deep(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


_DRAFT = "http://json-schema.org/draft"
_REFUSED: list[tuple[Any, str, str]] = [
    ([], "SPEC_INVALID", "/"),
    ({"properties": {"x": {"type": "string", "required": True}}}, "SPEC_INVALID",
     "/properties/x/required"),
    ({"properties": {"foo": "bar"}}, "SPEC_INVALID", "/properties/foo"),
    ({"properties": {"x": {"type": "something"}}}, "SPEC_INVALID", "/properties/x/type"),
    ({"pattern": "(\\d+"}, "SPEC_INVALID", "/pattern"),
    ({"patternProperties": {"[a": {}}}, "SPEC_INVALID", "/patternProperties/[a"),
    ({"$ref": "#/$defs/none"}, "SPEC_INVALID", "/$ref"),
    ({"$ref": "https://example.com/other.json"}, "SPEC_INVALID", "/$ref"),
    ({"$ref": "#"}, "SPEC_INVALID", "refers to itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
     "SPEC_INVALID", "refers to itself"),
    ({"$ref": "#/title", "title": "x"}, "SPEC_INVALID", "no schema"),
    ({"maxLength": 10**6}, "SPEC_TOO_LARGE", "/maxLength"),
    ({"pattern": "^a{1,1000000}$"}, "SPEC_TOO_LARGE", "/pattern"),
    ({"enum": list(range(20_001))}, "SPEC_TOO_LARGE", "/enum"),
    ({"anyOf": [{} for _ in range(20_001)]}, "SPEC_TOO_LARGE", "subschemas"),
    (_deep(5_000), "SPEC_TOO_LARGE", "nesting"),
    # No older draft is a way around the meta-schema.
    ({"unevaluatedProperties": "false"}, "SPEC_INVALID", "/unevaluatedProperties"),
    ({"unevaluatedItems": 3}, "SPEC_INVALID", "/unevaluatedItems"),
    ({"contains": 3}, "SPEC_INVALID", "/contains"),
    ({"if": 5, "then": {}}, "SPEC_INVALID", "/if"),
    ({"dependentSchemas": {"a": 5}}, "SPEC_INVALID", "/dependentSchemas"),
    ({"dependentSchemas": 5}, "SPEC_INVALID", "/dependentSchemas"),
    ({"dependentRequired": 5}, "SPEC_INVALID", "/dependentRequired"),
    ({"prefixItems": 7}, "SPEC_INVALID", "/prefixItems"),
    ({"minContains": "a", "contains": True}, "SPEC_INVALID", "/minContains"),
    ({"$defs": 5}, "SPEC_INVALID", "/$defs"),
    ({"$id": 5}, "SPEC_INVALID", "/$id"),
    ({"$ref": 5}, "SPEC_INVALID", "/$ref"),
    # In an older draft's place for schemas, where the newest one doesn't look.
    ({"$schema": f"{_DRAFT}-07/schema", "items": [{"prefixItems": 7}]}, "SPEC_INVALID",
     "/items/0/prefixItems"),
    ({"$schema": f"{_DRAFT}-04/schema#", "exclusiveMinimum": 5}, "SPEC_INVALID",
     "/exclusiveMinimum"),
    ({"$schema": f"{_DRAFT}-07/schema#", "exclusiveMinimum": True}, "SPEC_INVALID",
     "/exclusiveMinimum"),
    ({"$schema": f"{_DRAFT}-03/schema#", "divisibleBy": 5}, "SPEC_INVALID", "draft-04"),
    ({"$schema": "https://example.com/mine"}, "SPEC_INVALID", "/$schema"),
    ({"$schema": 7}, "SPEC_INVALID", "/$schema"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "reason", "says"), _REFUSED, ids=range(len(_REFUSED)))
def test_is_refused_with_a_pointer(schema: Any, reason: str, says: str) -> None:
    with pytest.raises(Invalid) as refused:
        check(schema)
    assert refused.value.reason == reason
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("schema", "dialect"),
    [
        (True, 2020),
        ({"type": "object"}, 2020),
        ({"$schema": "http://json-schema.org/draft-04/schema"}, 4),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, 7),
        ({"$schema": "https://json-schema.org/draft/2019-09/schema"}, 2019),
        ({"$schema": "http://json-schema.org/schema#"}, 2020),
        ({"$schema": "http://json-schema.org/draft-06/schema#", "$id": "#a"}, 6),
        ({"prefixItems": [{}], "items": [{}]}, 2019),
        ({"const": 1, "minimum": 1, "exclusiveMinimum": True}, 4),
        ({"items": [{"dependentRequired": {"a": ["b"]}}]}, 2019),
        ({"properties": {"$ref": {}, "if": {}}, "enum": [{"$ref": 5}]}, 2020),
        ({"minimum": 1, "exclusiveMinimum": True}, 4),
        ({"items": [{"type": "string"}]}, 2019),
        ({"pattern": "^\\p{L}+$"}, 2020),
        ({"properties": {"next": {"$ref": "#"}}}, 2020),
        ({"log": {"type": "string"}, "properties": {"log": {"$ref": "#/log"}}}, 2020),
        ({"$defs": {"x": {"$id": "x.json"}}, "$ref": "x.json"}, 2020),
    ],
)
def test_passes(schema: Any, dialect: int) -> None:
    assert check(schema) == dialect


def test_limits_are_the_callers() -> None:
    with pytest.raises(Invalid, match="schema_depth"):
        check(_deep(3), Limits(depth=2))


@pytest.mark.parametrize(
    ("key", "defs", "draft"),
    [("$id", "$defs", "2020-12/schema"), ("id", "definitions", "draft-04/schema#")],
)
def test_a_resource_inside_may_not_refer_to_itself(key: str, defs: str, draft: str) -> None:
    """Its references would be taken for the root's, which may be of another type."""
    inner = {key: "http://x/e", defs: {"x": {"type": "string"}}, "allOf": [{"$ref": f"#/{defs}/x"}]}
    kind = "http" if draft.startswith("draft") else "https"
    start = {"$schema": f"{kind}://json-schema.org/{'draft/' if kind == 'https' else ''}{draft}"}
    schema = {**start, defs: {"x": {"type": "integer"}, "e": inner}, "$ref": f"#/{defs}/e"}
    with pytest.raises(Invalid, match=f"/{defs.replace('$', '.')}/e/.?id") as caught:
        check(schema)
    assert caught.value.reason == "SPEC_UNSUPPORTED"
    del inner["allOf"]
    check(schema)
