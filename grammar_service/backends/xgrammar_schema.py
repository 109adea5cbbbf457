"""Which keywords of a JSON schema xgrammar drops: measured with 0.2.9, on open objects.

Each rule stands for a schema that xgrammar compiles without a word, and an instance that the schema
forbids and the masks admit (tests/backends/test_xgrammar_schema.py has them). It errs on the side
of naming: a keyword that is enforced in some shapes only is named in all others.
"""

import re
from collections.abc import Iterator
from typing import Any

from grammar_service.errors import Unenforced

_ALWAYS = {
    "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_OF_TYPE = {
    "minLength": "string", "maxLength": "string", "pattern": "string",
    "minimum": "number", "maximum": "number",
    "exclusiveMinimum": "number", "exclusiveMaximum": "number", "multipleOf": "number",
    "minItems": "array", "maxItems": "array", "items": "array", "prefixItems": "array",
    "minProperties": "object", "maxProperties": "object", "required": "object",
    "properties": "object", "patternProperties": "object", "additionalProperties": "object",
    "propertyNames": "object",
}  # fmt: skip
_ASSERTIONS = {*_OF_TYPE, *_ALWAYS, "type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}
_SCHEMA = {
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "additionalProperties",
    "items",
}
_SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
# The keyword that xgrammar looks at first hides those beside it.
_HIDES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


def dropped_keywords(schema: Any) -> list[Unenforced]:
    """Every keyword of the schema that the masks won't enforce, in the order of the schema."""
    return [
        Unenforced(pointer, keyword)
        for pointer, node in _nodes(schema, "")
        for keyword in node
        if keyword in _dropped(node)
    ]


def _nodes(schema: Any, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    stack = [(pointer, schema)]
    while stack:
        pointer, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield pointer, node
        inner: list[tuple[str, Any]] = []
        for key, value in node.items():
            if key in _SCHEMA:
                inner.append((f"{pointer}/{_escape(key)}", value))
            elif key in _SCHEMAS and isinstance(value, list):
                inner += [(f"{pointer}/{key}/{i}", item) for i, item in enumerate(value)]
            elif key in _NAMED_SCHEMAS and isinstance(value, dict):
                inner += [(f"{pointer}/{key}/{_escape(name)}", v) for name, v in value.items()]
        stack += reversed(inner)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _dropped(node: dict[str, Any]) -> set[str]:
    asserted = _ASSERTIONS & node.keys()
    dropped = _ALWAYS & asserted
    if node.get("uniqueItems") is False:
        dropped.discard("uniqueItems")
    hiding = next((keyword for keyword in _HIDES if keyword in node), None)
    if hiding:
        beside = asserted - {hiding}
        if hiding in ("const", "enum") and _typed(node, hiding):
            beside.discard("type")
        dropped |= beside
    if hiding == "oneOf" and not _disjoint(node["oneOf"]):
        dropped.add("oneOf")
    if hiding == "allOf" and len(node["allOf"]) != 1:
        dropped.add("allOf")
    if not hiding:
        dropped |= _dropped_beside_type(node, asserted)
    return dropped


def _dropped_beside_type(node: dict[str, Any], asserted: set[str]) -> set[str]:
    kind = node.get("type")
    kinds = set(kind) if isinstance(kind, list) else {kind}
    dropped = set()
    if kind is None:
        # Without a type these are read as the type that they belong to, or not at all.
        read = {"properties", "items", "prefixItems", "patternProperties", "additionalProperties"}
        dropped |= {keyword for keyword in asserted & _OF_TYPE.keys() if keyword not in read}
    if "multipleOf" in node and kinds & {"number", None}:
        dropped.add("multipleOf")
    if {"pattern", "format"} & node.keys():
        dropped |= {"minLength", "maxLength"} & asserted
    if {"pattern", "format"} <= node.keys():
        dropped.add("pattern")
    properties = node.get("properties", {})
    if any(name not in properties for name in node.get("required", [])):
        dropped.add("required")
    patterns = node.get("patternProperties", {})
    if any(_matches(pattern, name) for pattern in patterns for name in properties):
        dropped.add("patternProperties")
    if "propertyNames" in node and (properties or patterns):
        dropped.add("propertyNames")
    return dropped


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def _typed(node: dict[str, Any], keyword: str) -> bool:
    """Whether all values of an enum have a type that the schema names beside it."""
    kind = node.get("type")
    kinds: set[Any] = set(kind) if isinstance(kind, list) else {kind}
    if "number" in kinds:
        kinds.add("integer")
    values = [node["const"]] if keyword == "const" else node["enum"]
    return all(_type_of(value) in kinds for value in values)


def _type_of(value: Any) -> str:
    return "null" if value is None else _TYPE_OF.get(type(value), "object")


def _disjoint(branches: Any) -> bool:
    """Whether the branches can't both hold because their types differ."""
    seen: set[str] = set()
    for branch in branches:
        kind = branch.get("type") if isinstance(branch, dict) else None
        kinds: set[Any] = set(kind) if isinstance(kind, list) else {kind}
        if kinds & {"number", "integer"}:
            kinds |= {"number", "integer"}
        if kind is None or kinds & seen:
            return False
        seen |= kinds
    return True
