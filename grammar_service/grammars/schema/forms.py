r"""The form of a rewritten schema that each library is given.

What is changed here is for the library's sake. The form accepts what the schema accepts, or, for
the order of keys, less.

llguidance 1.9.1
- A format that it doesn't know is an error there and an annotation here: it becomes a pattern where
  `formats` has one, and is left out elsewhere.
- Keys of additional properties may be spelled with escapes, and so a declared key in disguise
  (`"\u0061"` for `"a"`) would be taken as an additional one. Keys of patternProperties have one
  spelling, so additional properties become those of the pattern that matches every name.
- Declared keys come in one order, and those of patternProperties in any, after them. So the first
  form is in another language, where keys come in any order (`any_order`). What can't be said there
  stays a schema, in the forms below; and where the library refuses the first, they are the next.
- As a schema, each object has two ways: the keys in the order of `properties`; or first the
  required ones, as `required` has them, then all others in any order, each as a pattern of its one
  name. In the second way an optional key may come twice, with a value that its schema allows each
  time; a closed object has no more keys than names, so that a model can't repeat them without end.
"""

import json
from enum import Enum
from functools import partial
from typing import Any

from grammar_service.grammars.schema import names, regex_sets
from grammar_service.grammars.schema.any_order import Rules, any_order
from grammar_service.grammars.schema.formats import PATTERNS
from grammar_service.grammars.schema.modern import APPLICATORS
from grammar_service.grammars.schema.patterns import for_library
from grammar_service.grammars.schema.walk import Node, escape

LLGUIDANCE_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
_HOISTED = 60
"""Bytes of a property's schema from which on it becomes a definition rather than a copy."""
_OTHERS = ""
"""The pattern of every name that isn't declared, made up here."""
_EVERY = "^(?s:.*)$"
"""The pattern of every name, declared or not, where the schema has one."""


def forms(schema: Any, backend: str, fixed_order: bool = False) -> list[Any | Rules]:
    """What a library is given for a rewritten schema: the first of these that it doesn't refuse.

    Args:
        schema: The schema, rewritten.
        backend: The library's name.
        fixed_order: Whether keys come in the order of `properties`, or the required ones first,
            only, and not in any order where the library can do that.
    """
    schema = for_library(schema, backend)
    if backend != "llguidance":
        return [schema]
    # Where objects are to be intersected, llguidance can't have them as it can elsewhere.
    ways = [_Orders.TWO, _Orders.ONE] if fixed_order else [_Orders.ANY, _Orders.TWO, _Orders.ONE]
    found: list[Any] = [_form(way, schema) for way in ways]
    if not fixed_order:
        found = [*any_order(schema, [partial(_form, way) for way in ways]), *found]
    return [item for i, item in enumerate(found) if item not in found[:i]]


def _form(way: "_Orders", schema: Any) -> Any:
    return _Llguidance(way).form(schema)


class _Orders(Enum):
    """The ways in which keys may come."""

    ANY = "two orders, and optional keys in any"
    TWO = "the order of properties, and required keys first"
    ONE = "the order of properties; additional keys may be spelled with escapes"


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
    def __init__(self, way: _Orders) -> None:
        self._way = way
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
        patterns: list[Node] = []
        for key, value in schema.items():
            if key in ("enum", "required"):
                new[key] = value
            elif key in ("properties", "patternProperties", "$defs", "dependentSchemas"):
                new[key] = {name: self._node(inner) for name, inner in value.items()}
            elif key == "format" and value in PATTERNS:
                patterns.append({"pattern": PATTERNS[value]})
            elif key != "format" or value in LLGUIDANCE_FORMATS:
                new[key] = self._node(value)
        if patterns:
            new["allOf"] = [*new.get("allOf", []), *patterns]
        # What is apart from its object is met before it's whole, and closes it.
        apart = [key for key in ("patternProperties", "additionalProperties") if key in new]
        new |= {key: new.pop(key) for key in apart}
        if self._way is _Orders.ONE:
            return new
        rest = new.get("additionalProperties", True)
        if "" in new.get("patternProperties", {}):
            named = new["patternProperties"].items()
            new["patternProperties"] = {key or _EVERY: value for key, value in named}
        if "properties" in new and "patternProperties" not in new and rest is not False:
            new.pop("additionalProperties", None)
            new |= {"patternProperties": {_OTHERS: rest}, "additionalProperties": False}
        return self._orders(new)

    def _orders(self, node: Node) -> Node:
        """The node with its properties in either order."""
        properties = node.get("properties", {})
        required = list(dict.fromkeys(node.get("required", [])))
        optional = [name for name in properties if name not in required]
        if any(name not in properties for name in required):
            return node
        if any(key in node for key in (*APPLICATORS, "minProperties")):
            return node
        parts = {name: self._definition(value) for name, value in properties.items()}
        free = {**node, "properties": {name: parts[name] for name in required}}
        if optional and self._way is _Orders.ANY:
            patterns = _patterns(node, {name: parts[name] for name in optional})
            if patterns is None:
                return node
            free["patternProperties"] = patterns
            if "patternProperties" not in node:
                free["maxProperties"] = min(
                    len(properties), node.get("maxProperties", names.MOST_NAMES)
                )
            if not required:
                del free["properties"]
        elif list(properties) == [*required, *optional]:
            return node
        else:
            free["properties"] |= {name: parts[name] for name in optional}
        if optional and "maxProperties" in node:
            # Properties are only counted where those that are declared are all required.
            return free
        free.pop("$defs", None)
        ordered = {key: value for key, value in node.items() if key != "$defs"}
        ordered["properties"] = parts
        definitions = {"$defs": node["$defs"]} if "$defs" in node else {}
        return {"anyOf": [ordered, free], **definitions}

    def _definition(self, schema: Any) -> Any:
        text = json.dumps(schema)
        if isinstance(schema, bool) or len(text) < _HOISTED:
            return schema
        if text not in self._names:
            # The names that `modern` gives have no "~".
            self._names[text] = f"part~{len(self._names)}"
            self._definitions[self._names[text]] = schema
        return {"$ref": f"#/$defs/{escape(self._names[text])}"}


def _patterns(node: Node, optional: dict[str, Any]) -> dict[str, Any] | None:
    """Optional properties as patterns of one name each, beside the node's own; None if it can't be.

    Patterns have to be disjoint, so the one for all other names leaves out the declared ones.
    """
    declared = list(node["properties"])
    if not names.fit(declared):
        return None
    # A name that may not come needs its pattern too: it would be an additional one without.
    patterns = {names.just(name): schema for name, schema in optional.items()}
    for pattern, schema in node.get("patternProperties", {}).items():
        if pattern == _OTHERS:
            patterns[names.other_than(declared)] = schema
        elif all(regex_sets.disjoint(pattern, regex_sets.literal(name)) for name in optional):
            patterns[pattern] = schema
        else:
            return None
    return patterns
