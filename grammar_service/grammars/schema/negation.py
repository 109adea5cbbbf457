"""What a schema forbids, as schemas one of which holds. Exact where `is_whole` says so.

What can't be said without `not` stays a `not` of that one keyword; often a sibling makes it moot,
as a `type` or an `enum` does, and where none does the rewrite that asked is dropped.
"""

from typing import Any

from grammar_service.grammars.schema.modern import KEYWORD_TYPE, ORIGIN
from grammar_service.grammars.schema.types import ALL, declared, type_of
from grammar_service.grammars.schema.walk import Node, Schema

MAX_BRANCHES = 64


_NOTHING = (ORIGIN, "then", "else", "minContains", "maxContains")
"""What asserts nothing, or is negated with its companion."""


class TooMany(Exception):
    """The negation has more branches than is sensible."""


def negate(schema: Schema) -> list[Schema]:
    """Branches that together accept just what the schema doesn't. Raises TooMany."""
    if isinstance(schema, bool):
        return [] if schema else [True]
    branches: list[Schema] = []
    for key, value in schema.items():
        branches += _keyword(schema, key, value)
        if len(branches) > MAX_BRANCHES:
            raise TooMany
    return branches


def is_whole(schema: Any) -> bool:
    """Whether the schema says what it says without a `not`; references aren't followed."""
    if isinstance(schema, list):
        return all(is_whole(item) for item in schema)
    if not isinstance(schema, dict):
        return True
    return "not" not in schema and all(
        is_whole(list(value.values()) if key in ("properties", "patternProperties") else value)
        for key, value in schema.items()
        if key != "enum"
    )


def _keyword(node: Node, key: str, value: Any) -> list[Schema]:
    origin = {ORIGIN: node.get(ORIGIN, "")}
    # A keyword of one type holds for values of all others.
    if key in KEYWORD_TYPE:
        origin["type"] = KEYWORD_TYPE[key]
    match key:
        case "type":
            types = declared(node)
            others = ALL - types
            if "integer" in types:
                return [{**origin, "type": sorted(others - {"number"})}, _leaf(origin, key, value)]
            return [{**origin, "type": sorted(others)}] if others else []
        case "enum":
            return _enum(origin, value)
        case "required":
            return [{**origin, "properties": {name: False}} for name in value]
        case "properties":
            return _properties(origin, value)
        case "minimum":
            return [{**origin, "exclusiveMaximum": value}]
        case "maximum":
            return [{**origin, "exclusiveMinimum": value}]
        case "exclusiveMinimum":
            return [{**origin, "maximum": value}]
        case "exclusiveMaximum":
            return [{**origin, "minimum": value}]
        case "minLength" | "minItems" | "minProperties":
            return [{**origin, key.replace("min", "max"): value - 1}] if value else []
        case "maxLength" | "maxItems" | "maxProperties":
            return [{**origin, key.replace("max", "min"): value + 1}]
        case "anyOf":
            return [{**origin, "allOf": [{**origin, "anyOf": negate(part)} for part in value]}]
        case "allOf":
            return [branch for part in value for branch in negate(part)]
        case "not":
            return [value]
        case _ if key in _NOTHING:
            return []
        case _ if key.startswith("unevaluated"):
            # It looks at its siblings, so it can't be negated alone.
            raise TooMany
        case _:
            return [_leaf(origin, key, _with_companions(node, key))]


def _leaf(origin: Node, key: str, value: Any) -> Schema:
    if key == "type":
        return {ORIGIN: origin[ORIGIN], "type": "number", "not": {"type": value}}
    return {**origin, "not": value}


def _with_companions(node: Node, key: str) -> Node:
    """The keyword with those that it means something with only."""
    groups = (
        ("contains", "minContains", "maxContains"), ("if", "then", "else"),
        ("additionalProperties", "properties", "patternProperties"), ("items", "prefixItems"),
    )  # fmt: skip
    group = next((group for group in groups if group[0] == key), (key,))
    return {name: node[name] for name in group if name in node}


def _enum(origin: Node, values: list[Any]) -> list[Schema]:
    """Types that no value has, the other boolean, and whatever else isn't one of them."""
    types = {type_of(value) for value in values}
    numeric = {"number"} if "integer" in types else set()
    branches: list[Schema] = []
    others = ALL - types - numeric
    if others:
        branches.append({**origin, "type": sorted(others)})
    if "boolean" in types:
        other = [value for value in (False, True) if not any(value is item for item in values)]
        if other:
            branches.append({**origin, "enum": other})
    open_types = sorted((types | numeric) - {"boolean", "null", "integer"})
    if open_types:
        branches.append({**origin, "type": open_types, "not": {"enum": values}})
    return branches


def _properties(origin: Node, properties: dict[str, Schema]) -> list[Schema]:
    branches: list[Schema] = []
    for name, schema in properties.items():
        negated = negate(schema)
        if negated:
            inner: Schema = {ORIGIN: origin[ORIGIN], "anyOf": negated}
            branches.append({**origin, "properties": {name: inner}, "required": [name]})
    return branches
