"""Drafts 4 to 2020-12 as one dialect, so that the rest of the package knows one set of keywords.

The result has the keywords of 2020-12 that assert something, and `format`; all annotations are
gone. Each node says under ORIGIN where it was. References lead to `$defs` only, which are kept in a
table beside the root, since the place of a definition doesn't matter.

A keyword that the declared draft doesn't know yet (`const` in draft 4) is taken as it was meant.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from grammar_service.grammars.schema.walk import NAMED, Node, References, Schema, escape

ORIGIN = "\0origin"
"""A key of every node: its JSON pointer in the schema as it was given."""

DIALECTS = (4, 6, 7, 2019, 2020)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

KEYWORD_TYPE = {
    "minLength": "string", "maxLength": "string", "pattern": "string", "format": "string",
    "minimum": "number", "maximum": "number", "multipleOf": "number",
    "exclusiveMinimum": "number", "exclusiveMaximum": "number",
    "minItems": "array", "maxItems": "array", "uniqueItems": "array", "items": "array",
    "prefixItems": "array", "contains": "array", "minContains": "array", "maxContains": "array",
    "unevaluatedItems": "array",
    "minProperties": "object", "maxProperties": "object", "required": "object",
    "properties": "object", "patternProperties": "object", "additionalProperties": "object",
    "propertyNames": "object", "dependentRequired": "object", "dependentSchemas": "object",
    "unevaluatedProperties": "object",
}  # fmt: skip
"""The keywords that look at values of one type only."""
APPLICATORS = (
    "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if",
    "dependentSchemas",
)  # fmt: skip
_SINGLE = (
    "not", "if", "then", "else", "contains", "items", "additionalProperties", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "dependentSchemas")
_PLAIN = (*KEYWORD_TYPE, "type", "dependentRequired", "$dynamicRef", "$recursiveRef")
_COUNTS = {
    "minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains",
    "minProperties", "maxProperties",
}  # fmt: skip
_EMPTY = {"minLength": 0, "minItems": 0, "minProperties": 0, "uniqueItems": False, "required": []}


class Modern:
    """A schema in the one dialect: its root, and its definitions by name.

    Args:
        schema: A schema that `check` let pass.
        dialect: One of DIALECTS.
    """

    def __init__(self, schema: Any, dialect: int) -> None:
        self._schema = schema
        self._dialect = dialect
        self._references = References(schema)
        self._evaluates = '"unevaluatedItems"' in json.dumps(schema)
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Schema] = {}
        self.root = self._schema_at("", schema)
        # Translating a definition may meet references to more of them.
        for pointer, name in self._growing():
            self.definitions[name] = self._schema_at(pointer, self._references.at(pointer))

    def _growing(self) -> Iterator[tuple[str, str]]:
        done = 0
        while done < len(self._names):
            names = list(self._names.items())
            yield from names[done:]
            done = len(names)

    def _schema_at(self, pointer: str, node: Any) -> Schema:
        if not isinstance(node, dict):
            return node is not False
        if "$ref" in node and self._dialect <= 7:
            # Up to draft 7, what stands beside a reference is ignored.
            return {ORIGIN: pointer, "$ref": self._reference(node["$ref"])}
        new: Node = {ORIGIN: pointer}
        for key, value in node.items():
            self._keyword(pointer, node, key, value, new)
        _drop_empty(new)
        # Items that contain something count as evaluated; nothing else does.
        if not self._evaluates:
            _drop_contains(new)
        return new

    def _keyword(self, pointer: str, node: Node, key: str, value: Any, new: Node) -> None:
        here = f"{pointer}/{escape(key)}"
        match key:
            case "$ref":
                new["$ref"] = self._reference(value)
            case "const" | "enum":
                values = [value] if key == "const" else value
                new["enum"] = values if "enum" not in new else same(values, new["enum"])
            case "items" if isinstance(value, list):
                new["prefixItems"] = self._list(here, value)
                if "additionalItems" in node:
                    rest = f"{pointer}/additionalItems"
                    new["items"] = self._schema_at(rest, node["additionalItems"])
            case "minimum" | "maximum":
                bound = f"exclusive{key.capitalize()}"
                new[bound if node.get(bound) is True else key] = value
            case "exclusiveMinimum" | "exclusiveMaximum":
                if not isinstance(value, bool):
                    new[key] = value
            case "dependencies":
                self._dependencies(here, value, new)
            case _ if key in _NAMED:
                inner = self._named(here, value)
                new[key] = {**new[key], **inner} if key in new else inner
            case "dependentRequired":
                new[key] = {**new.get(key, {}), **value}
            case _ if key in _SINGLE:
                new[key] = self._schema_at(here, value)
            case _ if key in _LISTS:
                new[key] = self._list(here, value)
            case _ if key in _COUNTS and isinstance(value, float):
                # 1.0 counts by the standard, and no library reads it.
                new[key] = int(value) if value.is_integer() else value
            case _ if key in _PLAIN:
                new[key] = value

    def _list(self, pointer: str, nodes: list[Any]) -> list[Schema]:
        return [self._schema_at(f"{pointer}/{i}", node) for i, node in enumerate(nodes)]

    def _named(self, pointer: str, nodes: dict[str, Any]) -> dict[str, Schema]:
        return {
            name: self._schema_at(f"{pointer}/{escape(name)}", node) for name, node in nodes.items()
        }

    def _dependencies(self, pointer: str, value: dict[str, Any], new: Node) -> None:
        for name, dependency in value.items():
            if isinstance(dependency, list | str):
                names = [dependency] if isinstance(dependency, str) else dependency
                new.setdefault("dependentRequired", {})[name] = names
            else:
                inner = self._schema_at(f"{pointer}/{escape(name)}", dependency)
                new.setdefault("dependentSchemas", {})[name] = inner

    def _reference(self, reference: str) -> str:
        pointer = self._references.resolve(reference)
        # Checked before; a schema that wasn't checked may as well fail here.
        if pointer is None:
            raise ValueError(f"the schema has nothing at {reference!r}")
        if pointer not in self._names:
            last = re.sub(r"[^A-Za-z0-9_.-]", "_", pointer.rsplit("/", 1)[-1]) or "root"
            taken = set(self._names.values())
            name, count = last, 1
            while name in taken:
                count += 1
                name = f"{last}_{count}"
            self._names[pointer] = name
        return f"#/$defs/{self._names[pointer]}"


def _drop_empty(node: Node) -> None:
    """Takes away what asserts nothing."""
    for key, nothing in _EMPTY.items():
        if node.get(key) == nothing and key in node:
            del node[key]
    if "if" not in node or not {"then", "else"} & node.keys():
        for key in ("if", "then", "else"):
            node.pop(key, None)
    if "contains" not in node:
        node.pop("minContains", None)
        node.pop("maxContains", None)
    for key in ("prefixItems", "properties", "patternProperties", "allOf"):
        if key in node and not node[key]:
            del node[key]


def _drop_contains(node: Node) -> None:
    """`contains: true` is about the length alone; `contains: false` allows no array."""
    if node.get("contains") is False and node.get("minContains") == 0:
        for key in ("contains", "minContains", "maxContains"):
            node.pop(key, None)
    if not isinstance(node.get("contains"), bool):
        return
    contains = node.pop("contains")
    least = node.pop("minContains", 1)
    most = node.pop("maxContains", None)
    if contains is False:
        node["minItems"] = 1
        node["maxItems"] = 0
        return
    if least:
        node["minItems"] = max(least, node.get("minItems", 0))
    if most is not None:
        node["maxItems"] = min(most, node.get("maxItems", most))


def key_of(value: Any) -> str:
    """A text that two JSON values share where the standard calls them equal: 1 and 1.0, not 1 and
    true.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(key_of, value)) + "]"
    if isinstance(value, dict):
        inner = sorted((json.dumps(name), key_of(item)) for name, item in value.items())
        return "{" + ",".join(f"{name}:{item}" for name, item in inner) + "}"
    return json.dumps(value)


def same(values: list[Any], others: list[Any]) -> list[Any]:
    """The values that the others have too, in their order, each once."""
    keys = {key_of(value) for value in others}
    return list({key: value for value in values if (key := key_of(value)) in keys}.values())


def named_children(node: Node) -> Iterator[tuple[str, str | int | None, Schema]]:
    """The subschemas of a node in the one dialect: keyword, name or index, schema."""
    for key, value in node.items():
        if key in _SINGLE:
            yield key, None, value
        elif key in _LISTS:
            for i, inner in enumerate(value):
                yield key, i, inner
        elif key in NAMED and key != "$defs":
            for name, inner in value.items():
                yield key, name, inner
