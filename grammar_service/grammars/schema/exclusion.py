"""Whether two schemas can't both accept a value. "No" means that no reason was found."""

from itertools import product
from typing import Any

from grammar_service.grammars.regex import RegexError
from grammar_service.grammars.schema import regex_sets
from grammar_service.grammars.schema.conjunction import for_name
from grammar_service.grammars.schema.modern import Modern, key_of
from grammar_service.grammars.schema.types import ALL, meet, possible, reference_name
from grammar_service.grammars.schema.walk import Node, Schema

_DEPTH = 8
"""How far the properties of properties are looked at."""


def exclusive(
    first: Schema,
    second: Schema,
    modern: Modern,
    depth: int = _DEPTH,
    within: frozenset[str] = ALL,
) -> bool:
    """Whether no value is accepted by both; no value of the types within which is asked."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is False or second is False
    types = meet(within, meet(possible(first, modern), possible(second, modern)))
    if not types:
        return True
    if depth == 0:
        return False
    lefts, rights = _parts(first, modern), _parts(second, modern)
    return any(
        _parts_exclude(left, right, modern, depth, types)
        for left, right in product(lefts, rights)
    )  # fmt: skip


def _parts(node: Node, modern: Modern) -> list[Node]:
    """Schemas that a value has to meet all of, references followed."""
    parts, stack, seen = [], [node], set()
    while stack:
        part = stack.pop()
        parts.append(part)
        name = reference_name(part)
        target: Any = None
        if name is not None and name not in seen:
            seen.add(name)
            target = modern.definitions[name]
        stack += [inner for inner in [target, *part.get("allOf", ())] if isinstance(inner, dict)]
    return parts


def _parts_exclude(
    first: Node, second: Node, modern: Modern, depth: int, types: frozenset[str]
) -> bool:
    for one, two in ((first, second), (second, first)):
        for key in ("anyOf", "oneOf"):
            if key in one and all(exclusive(branch, two, modern, depth - 1) for branch in one[key]):
                return True
    if "enum" in first and "enum" in second:
        keys = {key_of(value) for value in first["enum"]}
        return not any(key_of(value) in keys for value in second["enum"])
    # All types that are left have to be excluded.
    reasons = {
        "string": _strings, "array": _arrays, "object": _objects,
        "number": _numbers, "integer": _numbers,
    }  # fmt: skip
    return all(kind in reasons and reasons[kind](first, second, modern, depth) for kind in types)


def _strings(first: Node, second: Node, modern: Modern, depth: int) -> bool:
    if _apart(first, second, "minLength", "maxLength"):
        return True
    for one, two in ((first, second), (second, first)):
        if "pattern" in one and "enum" in two:
            values = [value for value in two["enum"] if isinstance(value, str)]
            texts = [regex_sets.literal(value) for value in values]
            if all(regex_sets.disjoint(one["pattern"], text) for text in texts):
                return True
    return (
        "pattern" in first
        and "pattern" in second
        and regex_sets.disjoint(first["pattern"], second["pattern"])
    )


def _numbers(first: Node, second: Node, modern: Modern, depth: int) -> bool:
    for one, two in ((first, second), (second, first)):
        if _apart(one, two, "minimum", "maximum"):
            return True
        for low, high in (
            ("exclusiveMinimum", "maximum"),
            ("minimum", "exclusiveMaximum"),
            ("exclusiveMinimum", "exclusiveMaximum"),
        ):
            if low in one and high in two and one[low] >= two[high]:
                return True
    return False


def _arrays(first: Node, second: Node, modern: Modern, depth: int) -> bool:
    if _apart(first, second, "minItems", "maxItems"):
        return True
    length = max(first.get("minItems", 0), second.get("minItems", 0))
    return any(
        exclusive(_item(first, i), _item(second, i), modern, depth - 1)
        for i in range(min(length, 16))
    )


def _item(node: Node, index: int) -> Schema:
    prefix = node.get("prefixItems", [])
    item: Schema = prefix[index] if index < len(prefix) else node.get("items", True)
    return item


def _objects(first: Node, second: Node, modern: Modern, depth: int) -> bool:
    if _apart(first, second, "minProperties", "maxProperties"):
        return True
    required = dict.fromkeys([*first.get("required", ()), *second.get("required", ())])
    try:
        return any(
            exclusive(
                for_name(first, name, _both), for_name(second, name, _both), modern, depth - 1
            )
            for name in required
        )
    except RegexError:
        return False


def _both(first: Schema, second: Schema) -> Schema:
    return {"allOf": [first, second]}


def _apart(first: Node, second: Node, low: str, high: str) -> bool:
    return any(
        low in one and high in two and one[low] > two[high]
        for one, two in ((first, second), (second, first))
    )
