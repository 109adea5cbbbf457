"""What is refused before any library sees a schema, each with a JSON pointer and what to do.

The meta-schema says whether a schema is one; past it come limits, references that lead nowhere or
in a circle, and regular expressions that aren't. Nothing recurses before the depth is known.
"""

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from grammar_service.errors import Invalid
from grammar_service.grammars.regex import Irregular, Malformed, read
from grammar_service.grammars.schema.dialect import dialect_of
from grammar_service.grammars.schema.modern import COUNTS
from grammar_service.grammars.schema.walk import References, escape, subschemas

_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a schema may be at most; each bounds what a library could be made to do with it.

    Attributes:
        depth: Nesting of its JSON. Rewriting recurses, and so do the libraries, on native stacks.
        nodes: Its subschemas.
        enum: Values of an enum: each is text in the grammar.
        repetition: Of maxLength, maxItems and their like, and of {n,m} in an expression. Some
            libraries unroll them.
    """

    depth: int = 100
    nodes: int = 20_000
    enum: int = 20_000
    repetition: int = 100_000


def check(schema: Any, limits: Limits | None = None) -> int:
    """Refuses what is no schema, or too large; returns the dialect that it is written in.

    A schema without `$schema` is read in the newest dialect that it is valid in, so that the
    boolean exclusiveMinimum of draft 4 means what it says.

    Args:
        schema: The schema, parsed.
        limits: Limits other than the usual ones.

    Raises:
        Invalid: With SPEC_INVALID, SPEC_UNSUPPORTED or SPEC_TOO_LARGE.
    """
    limits = limits or Limits()
    if not isinstance(schema, dict | bool):
        _invalid("", "a schema is an object or a boolean")
    _check_depth(schema, limits)
    dialect = dialect_of(schema)
    nodes = []
    for pointer, node in subschemas(schema):
        nodes.append((pointer, node))
        if len(nodes) > limits.nodes:
            _too_large(pointer, "subschemas", limits.nodes, "schema_nodes")
    for pointer, node in nodes:
        if isinstance(node, dict):
            _check_node(pointer, node, limits)
    _check_resources(nodes, dialect)
    _check_references(schema, nodes)
    return dialect


def _check_depth(schema: Any, limits: Limits) -> None:
    stack = [(schema, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > limits.depth:
            _too_large("", "levels of nesting", limits.depth, "schema_depth")
        if isinstance(value, dict):
            stack += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            stack += [(item, depth + 1) for item in value]


def _check_node(pointer: str, node: dict[str, Any], limits: Limits) -> None:
    values = node.get("enum")
    if isinstance(values, list) and len(values) > limits.enum:
        _too_large(f"{pointer}/enum", "values", limits.enum, "schema_enum")
    for key in COUNTS:
        count = node.get(key)
        if isinstance(count, int | float) and count > limits.repetition:
            _too_large(f"{pointer}/{key}", "repetitions", limits.repetition, "schema_repetition")
    patterns = node.get("patternProperties")
    found = [(f"{pointer}/pattern", node["pattern"])] if "pattern" in node else []
    if isinstance(patterns, dict):
        found += [(f"{pointer}/patternProperties/{escape(name)}", name) for name in patterns]
    for at, pattern in found:
        _check_pattern(at, pattern, limits)


def _check_pattern(pointer: str, pattern: str, limits: Limits) -> None:
    for least, most in _REPETITION.findall(pattern):
        if max(int(least), int(most or 0)) > limits.repetition:
            _too_large(pointer, "repetitions", limits.repetition, "schema_repetition")
    try:
        read(pattern, search=True)
    except Malformed as error:
        _invalid(pointer, f"{pattern[:80]!r} is no regular expression: {error}")
    except Irregular:
        pass  # the report names it


def _check_resources(nodes: list[tuple[str, Any]], dialect: int) -> None:
    """Refuses references within an embedded resource: they don't mean the root's definitions."""
    key = "id" if dialect == 4 else "$id"
    owners = {
        pointer
        for pointer, node in nodes
        if pointer and isinstance(node, dict) and _begins_resource(node.get(key))
    }
    for pointer, node in nodes if owners else ():
        reference = node.get("$ref") if isinstance(node, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            continue
        owner = pointer
        while owner and owner not in owners:
            owner = owner.rpartition("/")[0]
        if owner:
            raise Invalid(
                "SPEC_UNSUPPORTED",
                f"the schema at {owner}/{key}: a resource of its own, to which {pointer}/$ref "
                f"refers; move its definitions into the root's, and drop the {key}",
            )


def _begins_resource(name: Any) -> bool:
    return isinstance(name, str) and not name.startswith("#")


def _check_references(schema: Any, nodes: list[tuple[str, Any]]) -> None:
    references = References(schema)
    leads: dict[str, str] = {}
    for pointer, node in nodes:
        if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
            continue
        target = references.resolve(node["$ref"])
        at = f"{pointer}/$ref"
        if target is None:
            local = node["$ref"].startswith("#")
            what = (
                "has no target in this schema; define it under $defs"
                if local
                else "leads out of this schema, and nothing is fetched; put it under $defs"
            )
            _invalid(at, f"{node['$ref'][:200]!r} {what}")
        if not isinstance(references.at(target), dict | bool):
            _invalid(at, f"{node['$ref'][:200]!r} leads to what is no schema")
        leads[pointer] = target
    _check_circles(nodes, leads)


def _check_circles(nodes: list[tuple[str, Any]], leads: dict[str, str]) -> None:
    """A schema that is itself, without a value in between, says nothing."""
    edges: dict[str, list[str]] = {}
    for pointer, target in leads.items():
        edges.setdefault(pointer, []).append(target)
    for pointer, node in nodes:
        if isinstance(node, dict):
            for key in ("allOf", "anyOf", "oneOf"):
                if isinstance(node.get(key), list):
                    inner = [f"{pointer}/{key}/{i}" for i in range(len(node[key]))]
                    edges.setdefault(pointer, []).extend(inner)
            for key in ("not", "if", "then", "else"):
                if key in node:
                    edges.setdefault(pointer, []).append(f"{pointer}/{key}")
    done: set[str] = set()
    for start in edges:
        path, on_path = [(start, iter(edges.get(start, ())))], {start}
        while path:
            here, rest = path[-1]
            step = next(rest, None)
            if step is None:
                path.pop()
                on_path.discard(here)
                done.add(here)
            elif step in on_path:
                _invalid(step, "refers to itself with no value in between; it can't be matched")
            elif step not in done:
                on_path.add(step)
                path.append((step, iter(edges.get(step, ()))))


def _invalid(pointer: str, message: str) -> NoReturn:
    raise Invalid("SPEC_INVALID", f"the schema at {pointer or '/'}: {message}")


def _too_large(pointer: str, what: str, limit: int, setting: str) -> NoReturn:
    raise Invalid(
        "SPEC_TOO_LARGE",
        f"the schema at {pointer or '/'} has more than {limit} {what} ({setting})",
    )
