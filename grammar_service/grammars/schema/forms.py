"""The form of a rewritten schema that each library is given.

What is changed here is for the library's sake. The form accepts what the schema accepts, or, for
the order of keys, less.

llguidance 1.9.1
- A format that it doesn't know is an error there and an annotation here: it is left out.
- Keys of additional properties may be spelled with escapes, and so a declared key in disguise
  (`"\\u0061"` for `"a"`) would be taken as an additional one. Keys of patternProperties have one
  spelling, so additional properties become those of the pattern that matches every name.
- Declared keys come in one order. Where `required` has another order than `properties`, both that
  and "required ones first" are allowed.
"""

import json
from typing import Any

from grammar_service.grammars.schema.modern import APPLICATORS, Node
from grammar_service.grammars.schema.walk import escape

LLGUIDANCE_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
_HOISTED = 60
"""Bytes of a property's schema from which on it becomes a definition rather than a copy."""


def form(schema: Any, backend: str) -> Any:
    """What a library is given for a rewritten schema."""
    return _Llguidance().form(schema) if backend == "llguidance" else schema


def llguidance_overrides(max_whitespace: int) -> dict[str, Any]:
    """The options of LLMatcher.grammar_from_json_schema; they win over the schema's own."""
    return {
        "whitespace_flexible": max_whitespace > 0,
        "whitespace_pattern": (
            rf"[\x20\x0A\x0D\x09]{{1,{max_whitespace}}}" if max_whitespace else None
        ),
        "item_separator": ",",
        "key_separator": ":",
        "coerce_one_of": False,
        "lenient": False,
    }


class _Llguidance:
    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def form(self, schema: Any) -> Any:
        root = self._node(schema)
        if self._definitions:
            root["$defs"] = {**root.get("$defs", {}), **self._definitions}
        return root

    def _node(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._node(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        new: Node = {}
        for key, value in schema.items():
            if key in ("enum", "required"):
                new[key] = value
            elif key in ("properties", "patternProperties", "$defs", "dependentSchemas"):
                new[key] = {name: self._node(inner) for name, inner in value.items()}
            elif key != "format" or value in LLGUIDANCE_FORMATS:
                new[key] = self._node(value)
        rest = new.get("additionalProperties", True)
        if "properties" in new and "patternProperties" not in new and rest is not False:
            new["patternProperties"] = {"": rest}
            new["additionalProperties"] = False
        return self._orders(new)

    def _orders(self, node: Node) -> Node:
        """The node with its properties in either order."""
        properties, required = node.get("properties", {}), node.get("required", [])
        if any(name not in properties for name in required):
            return node
        if any(key in node for key in APPLICATORS):
            return node
        other = [*required, *(name for name in properties if name not in required)]
        if other == list(properties):
            return node
        parts = {name: self._definition(value) for name, value in properties.items()}
        beside = {key: value for key, value in node.items() if key != "$defs"}
        orders = [
            {**beside, "properties": {name: parts[name] for name in names}}
            for names in (list(properties), other)
        ]
        return {key: value for key, value in node.items() if key == "$defs"} | {"anyOf": orders}

    def _definition(self, schema: Any) -> Any:
        text = json.dumps(schema)
        if isinstance(schema, bool) or len(text) < _HOISTED:
            return schema
        if text not in self._names:
            # The names that `modern` gives have no "~".
            self._names[text] = f"part~{len(self._names)}"
            self._definitions[self._names[text]] = schema
        return {"$ref": f"#/$defs/{escape(self._names[text])}"}
