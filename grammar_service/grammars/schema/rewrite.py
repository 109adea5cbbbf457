"""A schema in the form that the backends enforce most of, and where each part of it came from.

`modern` makes one dialect of all drafts, `simplify` merges and resolves; this puts the result
together: definitions that are still referred to, objects closed if the caller wants it.
"""

from dataclasses import dataclass
from typing import Any

from grammar_service.grammars.regex import RegexError
from grammar_service.grammars.schema.conjunction import conjoin, for_name
from grammar_service.grammars.schema.modern import APPLICATORS, ORIGIN, Modern
from grammar_service.grammars.schema.simplify import Simplifier
from grammar_service.grammars.schema.types import reference_name
from grammar_service.grammars.schema.walk import Node, Schema, subschemas


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema that accepts what the original does.

    Attributes:
        schema: In draft 2020-12, without annotations, references into `$defs` only.
        origins: JSON pointers in the original by those in `schema`.
    """

    schema: Any
    origins: dict[str, str]

    def origin(self, pointer: str) -> str:
        """The pointer in the original of the node, or of the nearest one around it."""
        while pointer not in self.origins and pointer:
            pointer = pointer.rpartition("/")[0]
        return self.origins.get(pointer, "")


def rewrite(schema: Any, dialect: int, close_objects: bool = False) -> Rewritten:
    """Rewrites a schema that `check` let pass, whose dialect it gave.

    Args:
        schema: The schema, parsed.
        dialect: One of modern.DIALECTS.
        close_objects: Objects that don't say which further properties they take have none.
    """
    modern = Modern(schema, dialect)
    simplifier = Simplifier(modern)
    root = simplifier.simplify(modern.root)
    definitions: dict[str, Schema] = {}
    pending = _references(root)
    while pending:
        name = pending.pop()
        if name not in definitions:
            definitions[name] = simplifier.simplify(modern.definitions[name])
            pending += _references(definitions[name])
    root = _declared(root)
    definitions = {name: _declared(node) for name, node in definitions.items()}
    if close_objects:
        root = _closed(root)
        definitions = {name: _closed(node) for name, node in definitions.items()}
    if definitions and isinstance(root, dict):
        ordered = [name for name in modern.definitions if name in definitions]
        root = {**root, "$defs": {name: definitions[name] for name in ordered}}
    return _without_origins(root)


def _references(schema: Schema) -> list[str]:
    names = [reference_name(node) for _, node in subschemas(schema)]
    return [name for name in names if name is not None]


def _declared(schema: Any) -> Any:
    """The schema with every required name among the properties, in which libraries look for it."""
    if isinstance(schema, list):
        return [_declared(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    new: Node = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "dependentSchemas"):
            new[key] = {name: _declared(inner) for name, inner in value.items()}
        else:
            new[key] = value if key in ("enum", "required") else _declared(value)
    missing = [n for n in new.get("required", ()) if n not in new.get("properties", {})]
    if missing and not any(key in new for key in APPLICATORS):
        try:
            named = {name: for_name(new, name, _both) for name in missing}
        except RegexError:
            return new
        new["properties"] = {**new.get("properties", {}), **named}
    return new


def _both(first: Schema, second: Schema) -> Schema:
    return conjoin(first, second, _both)


def _closed(schema: Any) -> Any:
    """The schema with every object closed that names properties, and not what else it takes.

    One that names none is a dictionary: closed, it would be empty. vLLM's xgrammar has it so.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    new: Node = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "dependentSchemas"):
            new[key] = {name: _closed(inner) for name, inner in value.items()}
        elif key in ("enum", "not", "if", "contains"):
            new[key] = value
        else:
            new[key] = _closed(value)
    names = {"properties", "patternProperties", "required"} & schema.keys()
    explicit = {"additionalProperties", "unevaluatedProperties"} & schema.keys()
    if names and not explicit:
        # Beside other schemas, the names of all of them are allowed.
        merged = not any(key in schema for key in APPLICATORS)
        new["additionalProperties" if merged else "unevaluatedProperties"] = False
    return new


def _without_origins(root: Schema) -> Rewritten:
    origins: dict[str, str] = {}
    if isinstance(root, bool):
        return Rewritten(root, {"": ""})
    for pointer, node in subschemas(root):
        if isinstance(node, dict) and ORIGIN in node:
            origins[pointer] = node[ORIGIN]
    return Rewritten(_strip(root), origins)


def _strip(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip(inner) for key, inner in value.items() if key != ORIGIN}
    return [_strip(item) for item in value] if isinstance(value, list) else value
