"""One form for schemas that mean the same: annotations gone, keywords in order.

It is what the id is of, and what is planned and compiled: masks follow the order of keywords too
(`allOf` before or after `properties`), so one id has to have one order. The order of properties, of
`required` and of branches is kept. Names and values that belong to the described JSON (in
properties, enum, const) are never touched.
"""

import json
from typing import Any
from urllib.parse import unquote

from grammar_service.grammars.schema.modern import KEYWORD_TYPE
from grammar_service.grammars.schema.walk import DEFINITIONS, MANY, NAMED, ONE

_KEPT = {
    *KEYWORD_TYPE, *ONE, *MANY, *NAMED, "type", "enum", "const", "dependentRequired",
    "$schema", "$ref", "$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef",
    "$recursiveRef", "$recursiveAnchor",
}  # fmt: skip


def normalise(schema: Any) -> Any:
    """The schema without what asserts nothing, keywords sorted. It is not changed itself.

    A schema that refers to a place of its own making ("#/log") keeps all that it has.
    """
    everything = '"$ref"' in json.dumps(schema) and not _refers_to_definitions(schema)
    return _node(schema, everything)


def _refers_to_definitions(schema: Any) -> bool:
    """Whether all references lead to where this module keeps everything."""
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str) and not _leads_to_kept(reference):
                return False
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return True


def _leads_to_kept(reference: str) -> bool:
    # Read as `References` does: an address may stand before the pointer, "%2F" for "/" in it.
    fragment = unquote(reference.partition("#")[2])
    if not fragment.startswith("/"):
        return True  # an id or an anchor, which only schemas have
    parts = fragment.split("/")
    return len(parts) == 3 and parts[1] in (*DEFINITIONS, "properties")


def _node(schema: Any, everything: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    new: dict[str, Any] = {}
    for key in sorted(schema):
        value = schema[key]
        if key in NAMED and isinstance(value, dict):
            new[key] = {name: _node(inner, everything) for name, inner in value.items()}
        elif key in MANY and isinstance(value, list):
            new[key] = [_node(inner, everything) for inner in value]
        elif key in ONE:
            new[key] = _node(value, everything)
        elif key in _KEPT or everything:
            new[key] = value
    return new
