"""What the bounds of a node come to: types without a value, and counts that hold anyway."""

import math

from grammar_service.grammars.schema.types import declared, with_types
from grammar_service.grammars.schema.walk import Node, Schema

_BOUNDS = {
    "string": (("minLength", "maxLength"),),
    "array": (("minItems", "maxItems"),),
    "object": (("minProperties", "maxProperties"),),
}


def drop_counts(node: Node) -> None:
    """Takes away counts of properties that hold anyway."""
    if node.get("minProperties", 0) <= len(set(node.get("required", ()))):
        node.pop("minProperties", None)
    closed = node.get("additionalProperties", True) is False and "patternProperties" not in node
    if closed and node.get("maxProperties", 0) >= len(node.get("properties", {})):
        node.pop("maxProperties", None)


def satisfiable(node: Node) -> Schema:
    """The node without the types of which it accepts no value."""
    types = declared(node)
    possible_types = frozenset(kind for kind in types if not _empty(node, kind))
    return node if possible_types == types else with_types(node, possible_types)


def _empty(node: Node, kind: str) -> bool:
    if kind in ("integer", "number"):
        return _no_number(node, kind)
    for low, high in _BOUNDS.get(kind, ()):
        if low in node and high in node and node[low] > node[high]:
            return True
    if kind == "array":
        prefix = node.get("prefixItems", [])
        least = node.get("minItems", 0)
        return any(item is False for item in prefix[:least]) or (
            least > len(prefix) and node.get("items", True) is False
        )
    if kind == "object":
        properties = node.get("properties", {})
        closed = node.get("additionalProperties", True) is False
        open_names = "patternProperties" in node or not closed
        return any(properties.get(name, open_names) is False for name in node.get("required", ()))
    return False


def _no_number(node: Node, kind: str) -> bool:
    low = max(node.get("minimum", -math.inf), node.get("exclusiveMinimum", -math.inf))
    high = min(node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf))
    if low > high:
        return True
    if low == -math.inf or high == math.inf:
        return False
    open_low, open_high = node.get("exclusiveMinimum") == low, node.get("exclusiveMaximum") == high
    if kind == "number":
        return bool(low == high and (open_low or open_high))
    least = math.floor(low) + 1 if open_low else math.ceil(low)
    most = math.ceil(high) - 1 if open_high else math.floor(high)
    return bool(least > most)
