"""Rewrites that keep the meaning, from the leaves of a schema to its root.

Each accepts the same JSON values before and after (tests/grammars/schema/test_rewrite.py proves it
with instances):

- `allOf`, and a `$ref` beside other keywords, are merged into one schema where that can be done.
- `if`, `not`, `dependentRequired` and `dependentSchemas` become an `anyOf` of what they allow,
  where the complement can be said without a `not`.
- `oneOf` becomes `anyOf`: its branches exclude each other, or each gets the complement of those
  that it overlaps with.
- An `enum` loses the values that its siblings forbid, and then its siblings.
- Branches that nothing satisfies go, and a lone branch takes the place of its `anyOf`.
- `unevaluatedProperties` and `unevaluatedItems` become their plain forms where nothing else in the
  schema could have evaluated more.
- Keywords of types that the schema doesn't allow go.
"""

from typing import Any

import jsonschema
from referencing.exceptions import Unresolvable

from grammar_service.grammars.regex import RegexError
from grammar_service.grammars.schema.conjunction import conjoin
from grammar_service.grammars.schema.emptiness import drop_counts, satisfiable
from grammar_service.grammars.schema.exclusion import exclusive
from grammar_service.grammars.schema.modern import APPLICATORS, ORIGIN, Modern, key_of
from grammar_service.grammars.schema.negation import MAX_BRANCHES, TooMany, is_whole, negate
from grammar_service.grammars.schema.patterns import for_python
from grammar_service.grammars.schema.types import (
    declared,
    meet,
    possible,
    reference_name,
    with_types,
)
from grammar_service.grammars.schema.walk import Node, Schema

MAX_STEPS = 20_000
"""Conjunctions in one schema; past it nothing more is merged."""
MAX_COPIED = 20_000
"""Bytes of siblings that are copied into the branches of an anyOf."""
_OBJECT = {"properties", "patternProperties", "additionalProperties", "required"}
_DEPENDS = (
    "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired", "contains", "enum",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that evaluate more or less by the value, or that are rewritten."""
_PLAIN_FORMS = (
    ("unevaluatedProperties", "additionalProperties"),
    ("unevaluatedItems", "items"),
)


class Simplifier:
    """Simplifies the schemas of one document, merging its definitions in where it has to."""

    def __init__(self, modern: Modern) -> None:
        self._modern = modern
        self._steps = 0
        self._inside: list[str] = []
        """The definitions that are being merged in: one that holds itself isn't merged again."""

    def simplify(self, schema: Schema) -> Schema:
        """The schema rewritten; what it refers to stays a reference."""
        self._steps += 1
        if isinstance(schema, bool) or self._steps > MAX_STEPS:
            return schema
        if any(key.startswith("unevaluated") for key in schema):
            return self._evaluating(schema)
        return self._node({key: self._keyword(key, value) for key, value in schema.items()})

    def _keyword(self, key: str, value: Any) -> Any:
        if key in ("properties", "patternProperties", "dependentSchemas"):
            return {name: self.simplify(inner) for name, inner in value.items()}
        if key in ("allOf", "anyOf", "oneOf", "prefixItems"):
            return [self.simplify(inner) for inner in value]
        if key in ("not", "if", "then", "else", "contains", "items", "additionalProperties",
                   "propertyNames", "unevaluatedItems", "unevaluatedProperties"):  # fmt: skip
            return self.simplify(value)
        return value

    def _node(self, node: Node) -> Schema:
        """A node whose children are simple."""
        parts: list[Schema] = []
        # The order of properties is that of the text.
        first = next(
            (key for key in node if key in ("allOf", "$ref", "properties", "required")), ""
        )
        for key, value in list(node.items()):
            match key:
                case "allOf":
                    parts += value
                case "$ref" if len(node) > 2:
                    parts.append({ORIGIN: node.get(ORIGIN, ""), "$ref": value})
                case "if" | "not" | "dependentRequired" | "dependentSchemas" | "oneOf":
                    said = self._without_not(node, key)
                    if said is None:
                        continue
                    parts.append(said)
                    for name in ("then", "else") if key == "if" else ():
                        node.pop(name, None)
                case _:
                    continue
            del node[key]
        if first in ("allOf", "$ref"):
            parts.append(node)
        else:
            parts.insert(0, node)
        result: Schema = True
        for part in parts:
            result = self._both(result, part)
        return self._tidy(result) if isinstance(result, dict) else result

    def _evaluating(self, schema: Node) -> Schema:
        """A node with unevaluatedProperties or unevaluatedItems, which look at their siblings.

        With nothing beside them that applies schemas, or what merges into one, these are
        additionalProperties and items. Else all stays as it is: no library enforces it.
        """
        rest = {key: value for key, value in schema.items() if not key.startswith("unevaluated")}
        if not self._static(rest, frozenset()):
            return schema
        merged = self._node({key: self._keyword(key, value) for key, value in rest.items()})
        if isinstance(merged, bool) or any(key in merged for key in APPLICATORS):
            return schema
        merged = dict(merged)
        for key, plain in _PLAIN_FORMS:
            # Where the plain form is there, it has evaluated the rest already.
            if key in schema and plain not in merged:
                merged[plain] = self.simplify(schema[key])
        return self._tidy(merged)

    def _static(self, schema: Schema, seen: frozenset[str]) -> bool:
        """Whether what a schema evaluates is plain to see: the properties and items it names."""
        if isinstance(schema, bool):
            return True
        if any(key in schema for key in _DEPENDS) or any(key.startswith("un") for key in schema):
            return False
        parts = list(schema.get("allOf", ()))
        name = reference_name(schema)
        if name is not None:
            if name in seen:
                return False
            seen |= {name}
            parts.append(self._modern.definitions[name])
        return all(self._static(part, seen) for part in parts)

    def _both(self, first: Schema, second: Schema) -> Schema:
        """The conjunction of two simple schemas, simple again."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            if isinstance(first, bool) or isinstance(second, bool):
                return conjoin(first, second, self._both)
            return {ORIGIN: first.get(ORIGIN, ""), "allOf": [first, second]}
        names = [reference_name(part) for part in (first, second)]
        if names[0] is not None and names[0] == names[1] and first == second:
            return first
        for i, name in enumerate(names):
            other = (second, first)[i]
            if name is None or other is True:
                continue
            if isinstance(other, dict) and not other.keys() - {ORIGIN}:
                continue
            if name in self._inside or len(self._inside) > 16:
                return self._apart(first, second)
            self._inside.append(name)
            target = self.simplify(self._modern.definitions[name])
            rest: Schema = (first, second)[i]
            assert isinstance(rest, dict)
            if len(rest.keys() - {ORIGIN, "$ref"}):
                beside = {key: value for key, value in rest.items() if key != "$ref"}
                target = self._both(beside, target)
            result = self._both(target, second) if i == 0 else self._both(first, target)
            self._inside.pop()
            return result
        merged = conjoin(first, second, self._both)
        return merged if isinstance(merged, bool) else self._tidy(merged)

    def _apart(self, first: Schema, second: Schema) -> Schema:
        if isinstance(first, bool) or isinstance(second, bool):
            return conjoin(first, second, self._both)
        if not meet(possible(first, self._modern), possible(second, self._modern)):
            return False
        return {ORIGIN: first.get(ORIGIN, ""), "allOf": [first, second]}

    def _without_not(self, node: Node, key: str) -> Schema | None:
        """What a conditional keyword allows, or None where that needs a `not`."""
        # What `negate` makes has no origin.
        value, origin = node[key], {ORIGIN: node.get(ORIGIN, "")}
        try:
            match key:
                case "not":
                    branches = self._negated(value)
                case "if":
                    branches = [self._both(value, node.get("then", True))]
                    branches += [
                        self._both(branch, node.get("else", True))
                        for branch in self._negated(value)
                    ]
                case "oneOf":
                    branches = self._one_of(node)
                case "dependentRequired":
                    value = {name: {**origin, "required": names} for name, names in value.items()}
                    return self._dependent(origin, value)
                case _:
                    return self._dependent(origin, value)
        except TooMany:
            return None
        said = self._any_of(origin, branches, node)
        # What was a `not` before may stay one.
        whole = is_whole(said) or (key != "not" and not is_whole(value))
        return said if whole else None

    def _dependent(self, origin: Node, schemas: dict[str, Schema]) -> Schema:
        """Either the name is absent, or what it asks for holds."""
        result: Schema = True
        for name, schema in schemas.items():
            present = self._both({**origin, "required": [name]}, schema)
            absent = {**origin, "properties": {name: False}}
            result = self._both(result, {**origin, "anyOf": [absent, present]})
        return result

    def _negated(self, schema: Schema) -> list[Schema]:
        """What the schema forbids; a reference is looked into, unless it leads to itself."""
        name = reference_name(schema)
        if name is not None and name not in self._inside:
            self._inside.append(name)
            target = self.simplify(self._modern.definitions[name])
            branches = self._negated(target)
            self._inside.pop()
            return branches
        # A `not` that `negate` leaves is of one keyword: nothing more can be made of it.
        return [
            branch if isinstance(branch, dict) and "not" in branch else self.simplify(branch)
            for branch in negate(schema)
        ]

    def _any_of(self, origin: Node, branches: list[Schema], beside: Node) -> Schema:
        """An anyOf, of which branches that the types and values beside it forbid are gone."""
        frame: Node = {**origin, **{k: beside[k] for k in ("type", "enum") if k in beside}}
        kept = []
        for branch in branches:
            both = self._both(frame, branch)
            if both is not False:
                kept.append(branch if is_whole(branch) else both)
        return self._tidy({**origin, "anyOf": kept})

    def _one_of(self, node: Node) -> list[Schema]:
        """The branches as those of an anyOf: each without what the others accept too."""
        branches = [branch for branch in node["oneOf"] if branch is not False]
        # What the siblings allow decides which complements are left to be said.
        siblings = {k: v for k, v in node.items() if k not in APPLICATORS}
        frame: Node = {k: node[k] for k in (ORIGIN, "type", "enum") if k in node}
        pieces = self._pieces(branches, frame)
        if not all(map(is_whole, pieces)):
            pieces = self._pieces(branches, siblings)
        return pieces

    def _pieces(self, branches: list[Schema], frame: Node) -> list[Schema]:
        result: list[Schema] = []
        for i, branch in enumerate(branches):
            pieces = [branch]
            for j, other in enumerate(branches):
                shared = frozenset() if i == j else self._shared(branch, other, declared(frame))
                if not shared:
                    continue
                # The rest of the other branch has nothing in common with this one.
                other = self._both(with_types({ORIGIN: frame.get(ORIGIN, "")}, shared), other)
                complement = self._negated(other)
                if pieces[0] is branch:
                    pieces = [self._both(frame, branch)]
                pieces = [self._both(piece, part) for piece in pieces for part in complement]
                pieces = [piece for piece in pieces if piece is not False]
                if len(pieces) + len(result) > MAX_BRANCHES:
                    raise TooMany
                if not pieces:
                    break
            result += pieces
        return result

    def _shared(self, first: Schema, second: Schema, types: frozenset[str]) -> frozenset[str]:
        """The types of which a value could be accepted by both."""
        return frozenset(
            kind
            for kind in types
            if not exclusive(first, second, self._modern, within=frozenset([kind]))
        )

    def _tidy(self, node: Node) -> Schema:
        """The local rewrites of a node whose children are simple."""
        if "allOf" in node and not node["allOf"]:
            del node["allOf"]
        if "enum" in node:
            return self._enum(node)
        new = with_types(node, declared(node))
        if isinstance(new, bool):
            return new
        new = satisfiable(new)
        if isinstance(new, bool):
            return new
        drop_counts(new)
        pure = [
            part
            for part in new.get("allOf", ())
            if isinstance(part, dict) and "anyOf" in part and part.keys() <= {ORIGIN, "anyOf"}
        ]
        if pure and "anyOf" not in new:
            new["anyOf"] = pure[0]["anyOf"]
            new["allOf"] = [part for part in new["allOf"] if part is not pure[0]]
            if not new["allOf"]:
                del new["allOf"]
        if "anyOf" in new:
            return self._branches(new)
        return new if new.keys() - {ORIGIN} else True

    def _branches(self, node: Node) -> Schema:
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        branches: dict[str, Schema] = {}
        for branch in node["anyOf"]:
            inner = [branch]
            if isinstance(branch, dict) and branch.keys() <= {ORIGIN, "anyOf"}:
                inner = branch.get("anyOf", [True])
            for part in inner:
                fits = meet(possible(part, self._modern), possible(rest, self._modern))
                if fits:
                    branches.setdefault(key_of(_without_origin(part)), part)
        found = list(branches.values())
        if any(branch is True for branch in found):
            return self._tidy(rest)
        if not found:
            return False
        size = len(found) * len(key_of(_without_origin(rest)))
        objects = any(isinstance(part, dict) and _OBJECT & part.keys() for part in found)
        if objects and (_OBJECT | {"type"}) & rest.keys() and size <= MAX_COPIED:
            # Merged here rather than by the backends, which can't do so with all references.
            found = [part for part in (self._both(rest, part) for part in found) if part]
            rest = {key: value for key, value in rest.items() if key in (ORIGIN, "type")}
            if not found:
                return False
        if len(found) == 1:
            return self._both(rest, found[0]) if rest.keys() - {ORIGIN} else found[0]
        implied = frozenset().union(*(possible(branch, self._modern) for branch in found))
        # A type that all branches imply is noise, and beside references it hinders llguidance.
        if rest.keys() <= {ORIGIN, "type"} and meet(implied, declared(rest)) == implied:
            rest.pop("type", None)
        return {**rest, "anyOf": found}

    def _enum(self, node: Node) -> Schema:
        """Only the values that the siblings allow too; then the siblings say nothing more."""
        rest = {key: value for key, value in node.items() if key != "enum"}
        values = list({key_of(value): value for value in node["enum"]}.values())
        if rest.keys() - {ORIGIN}:
            schema: Node = _without_origin(rest)
            if '"$ref"' in key_of(schema):
                definitions = self._modern.definitions
                schema["$defs"] = {
                    name: _without_origin(value) for name, value in definitions.items()
                }
            try:
                validator = jsonschema.Draft202012Validator(for_python(schema))
                values = [value for value in values if validator.is_valid(value)]
            except (RegexError, RecursionError, OverflowError, Unresolvable):
                # OverflowError: a division by a float; Unresolvable: a $dynamicRef.
                return node
        return {ORIGIN: node.get(ORIGIN, ""), "enum": values} if values else False


def _without_origin(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_origin(inner) for key, inner in value.items() if key != ORIGIN}
    return [_without_origin(item) for item in value] if isinstance(value, list) else value
