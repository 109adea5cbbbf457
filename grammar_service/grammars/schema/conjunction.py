"""Two schemas as one that accepts what both accept. Exact: what can't be merged stays an `allOf`.

Of each keyword in both, the rule is in _MERGE or in the functions for objects and arrays.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grammar_service.grammars.regex import RegexError
from grammar_service.grammars.schema import regex_sets
from grammar_service.grammars.schema.modern import ORIGIN, same
from grammar_service.grammars.schema.types import declared, meet, with_types
from grammar_service.grammars.schema.walk import Node, Schema

Conjoin = Callable[[Schema, Schema], Schema]
"""The conjunction of two subschemas; the caller decides how references are treated."""


def _multiple(first: Any, second: Any) -> Any:
    one, two = Fraction(str(first)), Fraction(str(second))
    both = Fraction(
        math.lcm(one.numerator * two.denominator, two.numerator * one.denominator),
        one.denominator * two.denominator,
    )
    return int(both) if both.denominator == 1 else float(both)


def _union(first: list[Any], second: list[Any]) -> list[Any]:
    return list(dict.fromkeys([*first, *second]))


def _dependent(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys([*first, *second])
    return {name: _union(first.get(name, []), second.get(name, [])) for name in names}


_MERGE: dict[str, Callable[[Any, Any], Any]] = {
    "enum": same, "required": _union, "multipleOf": _multiple, "dependentRequired": _dependent,
    "minimum": max, "exclusiveMinimum": max, "maximum": min, "exclusiveMaximum": min,
    "minLength": max, "maxLength": min, "minItems": max, "maxItems": min,
    "minProperties": max, "maxProperties": min,
    "uniqueItems": lambda one, two: one or two,
}  # fmt: skip
_OBJECT = ("properties", "patternProperties", "additionalProperties")
_ARRAY = ("prefixItems", "items")
_TOGETHER = (("contains", "minContains", "maxContains"), ("if", "then", "else"))
"""Keywords that mean something only with one another."""
_NEVER = ("unevaluatedProperties", "unevaluatedItems")
"""Keywords that look at what stands beside them."""


def conjoin(first: Schema, second: Schema, inner: Conjoin) -> Schema:
    """The schema of what both accept. Both are in the one dialect; neither is changed."""
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    if first == second or first.keys() <= {ORIGIN}:
        return second
    if second.keys() <= {ORIGIN}:
        return first
    try:
        return _merge(first, second, inner)
    except (_Apart, RegexError):
        return {ORIGIN: first.get(ORIGIN, ""), "allOf": [first, second]}


def _merge(first: Node, second: Node, inner: Conjoin) -> Schema:
    _check_mergeable(first, second)
    left: Node = {}
    merged: Node = {**first}
    for key, value in second.items():
        if key == ORIGIN or key in _OBJECT or key in _ARRAY or key == "type":
            continue
        if key not in merged or merged[key] == value:
            merged[key] = value
        elif key in _MERGE:
            merged[key] = _MERGE[key](merged[key], value)
        elif key == "allOf":
            merged[key] = [*merged[key], *value]
        else:
            # Both have it, and it can't be merged: the second one's goes into an allOf.
            for name in next((group for group in _TOGETHER if key in group), (key,)):
                if name in second:
                    left[name] = second[name]
                    if name not in first:
                        merged.pop(name, None)
    if any(key in second for key in _OBJECT):
        merged.update(_object(first, second, inner))
    if any(key in second for key in _ARRAY):
        merged.update(_array(first, second, inner))
    if left:
        merged["allOf"] = [*merged.get("allOf", []), {ORIGIN: second.get(ORIGIN, ""), **left}]
    return with_types(merged, meet(declared(first), declared(second)))


class _Apart(Exception):
    """The two can't be merged."""


def _check_mergeable(first: Node, second: Node) -> None:
    if any(key in first or key in second for key in _NEVER):
        raise _Apart
    # The additionalProperties of one would reach into the patterns of the other.
    for one, two in ((first, second), (second, first)):
        patterns = one.get("patternProperties", {}).keys()
        closes = two.get("additionalProperties", True) is not True
        if patterns and closes and patterns != two.get("patternProperties", {}).keys():
            raise _Apart


def for_name(node: Node, name: str, inner: Conjoin) -> Schema:
    """What a node asks of the value of a property."""
    schema: Schema = node.get("properties", {}).get(name, True)
    known = name in node.get("properties", {})
    for pattern, value in node.get("patternProperties", {}).items():
        if regex_sets.matches(pattern, name):
            schema = inner(schema, value)
            known = True
    return schema if known else node.get("additionalProperties", True)


def _object(first: Node, second: Node, inner: Conjoin) -> Node:
    merged: Node = {}
    names = dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})])
    if names:
        merged["properties"] = {
            name: inner(for_name(first, name, inner), for_name(second, name, inner))
            for name in names
        }
    patterns = dict(first.get("patternProperties", {}))
    for pattern, value in second.get("patternProperties", {}).items():
        patterns[pattern] = inner(patterns[pattern], value) if pattern in patterns else value
    if patterns:
        merged["patternProperties"] = patterns
    both = [node["additionalProperties"] for node in (first, second)
            if "additionalProperties" in node]  # fmt: skip
    if both:
        merged["additionalProperties"] = both[0] if len(both) == 1 else inner(both[0], both[1])
    return merged


def _array(first: Node, second: Node, inner: Conjoin) -> Node:
    merged: Node = {}
    prefixes = (first.get("prefixItems", []), second.get("prefixItems", []))
    rest = (first.get("items", True), second.get("items", True))
    length = max(map(len, prefixes))
    if length:
        merged["prefixItems"] = [
            inner(*(prefix[i] if i < len(prefix) else others
                    for prefix, others in zip(prefixes, rest, strict=True)))
            for i in range(length)
        ]  # fmt: skip
    items = inner(*rest)
    # Where it is said that there may be more, they count as evaluated.
    if items is not True or "items" in first or "items" in second:
        merged["items"] = items
    return merged
