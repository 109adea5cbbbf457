"""Sets of JSON types, and what a schema's values can be at most."""

from typing import Any

from grammar_service.grammars.schema.modern import KEYWORD_TYPE, TYPES, Modern
from grammar_service.grammars.schema.walk import Node, Schema

ALL = frozenset(TYPES) - {"integer"}
"""Every type; `number` has the integers."""


def type_of(value: Any) -> str:
    """The type of a JSON value; whole numbers are integers, however they are written."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def declared(node: Node) -> frozenset[str]:
    """The types that the node's own `type` allows."""
    kind = node.get("type", list(ALL))
    return _plain(frozenset([kind] if isinstance(kind, str) else kind))


def with_types(node: Node, types: frozenset[str]) -> Schema:
    """The node with just these types, and without the keywords of all others."""
    types = _plain(types)
    if not types:
        return False
    new = {key: value for key, value in node.items() if key != "type" and _looks_at(key, types)}
    if types != ALL:
        names = [name for name in TYPES if name in types]
        new["type"] = names[0] if len(names) == 1 else names
        # First, as people write it.
        new = {"type": new.pop("type"), **new}
    return new


def meet(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """The types in both."""
    both = set(first & second)
    numeric = {"integer", "number"}
    if numeric <= first | second and numeric & first and numeric & second:
        both.add("integer")
    return _plain(frozenset(both))


def possible(schema: Schema, modern: Modern, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """The types that a value of the schema can have at most; follows references."""
    if isinstance(schema, bool):
        return ALL if schema else frozenset()
    types = declared(schema)
    if "enum" in schema:
        types = meet(types, frozenset(type_of(value) for value in schema["enum"]))
    name = reference_name(schema)
    if name is not None and name not in seen:
        types = meet(types, possible(modern.definitions[name], modern, seen | {name}))
    for inner in schema.get("allOf", ()):
        types = meet(types, possible(inner, modern, seen))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            branches = [possible(inner, modern, seen) for inner in schema[key]]
            types = meet(types, _plain(frozenset().union(*branches)))
    return types


def reference_name(schema: Schema) -> str | None:
    """The name of the definition that a node refers to."""
    if isinstance(schema, dict) and "$ref" in schema:
        return str(schema["$ref"]).removeprefix("#/$defs/")
    return None


def _plain(types: frozenset[str]) -> frozenset[str]:
    return types - {"integer"} if "number" in types else types


def _looks_at(keyword: str, types: frozenset[str]) -> bool:
    kind = KEYWORD_TYPE.get(keyword)
    return kind is None or kind in types or (kind == "number" and "integer" in types)
