r"""Objects whose keys come in any order, in llguidance's Lark.

As a JSON schema, llguidance 1.9.1 takes declared keys in one order. But in its Lark a rule may have
a parameter of 64 bits (`rule::set_bit(3) %if bit_clear(3)`), expanded no further than a text goes.
So an object is such a rule: a bit for each declared key, which comes once at most; those that are
required have come at the end; and additional ones, which may repeat, stand anywhere between. The
arrays, alternatives and references around objects are rules too. All else stays a schema within the
Lark (`%json`), in the form that it has elsewhere.

- White space, and how often it may come (`ignore_once`), is the same in all parts. Otherwise each
  has a lexer of its own, and the first that takes a character has the text.
- Additional keys are a text without the declared ones, which have no other spelling in it
  (`"\u0061"` for `"a"`). Said with `~` rather than in an expression that spells it out, it takes a
  fifth of the time: the library sees what of the vocabulary fits at once.
- Alternatives are followed side by side, and the library ends where that becomes too many.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grammar_service.grammars.schema import names, regex_sets
from grammar_service.grammars.schema.modern import APPLICATORS
from grammar_service.grammars.schema.types import declared, reference_name, with_types
from grammar_service.grammars.schema.walk import Node, Schema, subschemas

_MOST_KEYS = 64
"""Bits of a parameter."""
_MOST_BYTES = 300_000
_MOST_ITEMS = 600
"""Items of the parser for alternatives that go side by side; the library has 2,000 at most."""
_MOST_SETS = 50
"""Of objects side by side that are looked at."""
_OBJECT = {"type", "properties", "required", "additionalProperties", "patternProperties"}
_ARRAY = {"type", "items", "minItems", "maxItems"}
_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(0[0-7bef]|1[0-9a-f]))*"/'
"""A string of JSON; no two of them are the same text, spelled in two ways."""


@dataclass(frozen=True, slots=True)
class Rules:
    """A schema as rules by name, in Lark or as schemas; `start` is the first."""

    lark: dict[str, str]
    schemas: dict[str, Any]

    def text(self, max_whitespace: int, item_separator: str, key_separator: str) -> str:
        """The whole as Lark."""
        lines = ["%llguidance {}"]
        options: dict[str, Any] = {
            "whitespace_flexible": False,
            # In schemas, expressions.
            "item_separator": re.escape(item_separator),
            "key_separator": re.escape(key_separator),
        }
        if max_whitespace:
            white = rf"[\x20\x0A\x0D\x09]{{1,{max_whitespace}}}"
            lines = ['%llguidance {"ignore_once": true}', f"%ignore /{white}/"]
            options = {"whitespace_flexible": True, "whitespace_pattern": white}
        lines += [f"COMMA: {_literal(item_separator)}", f"COLON: {_literal(key_separator)}"]
        lines += [f"STRING: {_STRING}", *(f"{name}: {rule}" for name, rule in self.lark.items())]
        for name, schema in self.schemas.items():
            if isinstance(schema, bool):
                schema = {} if schema else {"enum": []}
            bound = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
            lines.append(f"{name}: %json {bound}")
        return "\n".join(lines) + "\n"


def any_order(schema: Any, ways: Sequence[Callable[[Any], Any]]) -> list[Rules]:
    """A rewritten schema as rules; none where there is nothing to gain, or where it is too large.

    Args:
        schema: The schema.
        ways: The forms of what stays a schema; each makes rules of its own.
    """
    if not isinstance(schema, dict) or len(json.dumps(schema)) > _MOST_BYTES:
        return []
    nodes = _nodes(schema)
    named = any("properties" in node or "required" in node for node in nodes)
    references = {reference_name(node) for node in nodes} - {None}
    if not named or not references <= schema.get("$defs", {}).keys():
        return []
    writer = _Writer(schema)
    try:
        writer.write()
    except _TooLarge:
        return []
    found = [
        Rules(writer.lark, {name: way(part) for name, part in writer.schemas.items()})
        for way in ways
    ]
    return [rules for i, rules in enumerate(found) if rules not in found[:i]]


class _TooLarge(Exception):
    pass


class _Writer:
    def __init__(self, schema: Node) -> None:
        self._root = {key: value for key, value in schema.items() if key != "$defs"}
        self._definitions: dict[str, Any] = schema.get("$defs", {})
        self._names: dict[str, str] = {}
        """Names of rules by what they are of: each schema is written once."""
        self._pending: list[tuple[str, Schema]] = []
        self._bytes = 0
        self.lark: dict[str, str] = {}
        self.schemas: dict[str, Any] = {}

    def write(self) -> None:
        self._say("start", self._rule(self._root))
        while self._pending:
            self._write(*self._pending.pop())

    def _say(self, name: str, rule: str) -> None:
        self.lark[name] = rule
        self._count(rule)

    def _rule(self, node: Schema) -> str:
        """The name of the rule for a node."""
        name, is_new = self._name(node)
        if is_new:
            self._pending.append((name, node))
        return name

    def _name(self, key: Any, prefix: str = "r") -> tuple[str, bool]:
        text = json.dumps(key)
        is_new = text not in self._names
        if is_new:
            self._names[text] = f"{prefix}{len(self._names)}"
        return self._names[text], is_new

    def _count(self, text: str) -> None:
        self._bytes += len(text)
        if self._bytes > _MOST_BYTES:
            raise _TooLarge

    def _write(self, name: str, node: Schema) -> None:
        if isinstance(node, bool) or not any(
            {"properties", "required", "$ref"} & inner.keys() for inner in _nodes(node)
        ):
            self._leave(name, node)
        elif node.keys() == {"$ref"}:
            self._say(name, self._rule(self._definitions[str(reference_name(node))]))
        elif node.keys() == {"anyOf"} and self._is_narrow(node):
            self._say(name, " | ".join(map(self._rule, node["anyOf"])))
        elif node.get("type") == "object" and node.keys() <= _OBJECT:
            self._object(name, node)
        elif node.get("type") == "array" and node.keys() <= _ARRAY:
            self._array(name, node)
        elif not isinstance(node.get("type"), str) and not {*APPLICATORS, "enum"} & node.keys():
            kinds = declared(node)
            parts = [kinds & {"object"}, kinds & {"array"}, kinds - {"object", "array"}]
            branches = [with_types(node, part) for part in parts if part]
            self._say(name, " | ".join(map(self._rule, branches)))
        else:
            self._leave(name, node)

    def _leave(self, name: str, node: Schema) -> None:
        """The rule of a node that stays a schema, with the definitions that it needs."""
        needed: dict[str, Any] = {}
        pending: list[Schema] = [node]
        while pending:
            for inner in _nodes(pending.pop()):
                reference = reference_name(inner)
                if reference is not None and reference not in needed:
                    needed[reference] = self._definitions[reference]
                    pending.append(needed[reference])
        if needed and isinstance(node, dict):
            node = {**node, "$defs": needed}
        self.schemas[name] = node
        self._count(json.dumps(node))

    def _array(self, name: str, node: Node) -> None:
        least, most = node.get("minItems", 0), node.get("maxItems")
        if most is not None and most < max(least, 1):
            self._leave(name, node)
            return
        item = self._rule(node["items"])
        count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        # An upper limit of 0 is refused.
        items = item if most == 1 else f"{item} (COMMA {item}){'*' if count == '{0,}' else count}"
        self._say(name, f'"[" {items} "]"' if least else f'"[" ({items})? "]"')

    def _object(self, name: str, node: Node) -> None:
        values = {
            key: value for key, value in node.get("properties", {}).items() if value is not False
        }
        required = list(dict.fromkeys(node.get("required", ())))
        additional = self._additional(node)
        if (
            additional is None
            or len(values) > _MOST_KEYS
            or not values.keys() >= {*required}
            # Lark has no way to write it.
            or any("\x7f" in key for key in node.get("properties", {}))
        ):
            self._leave(name, node)
            return
        keys = [*required, *(key for key in values if key not in required)]
        once = " | ".join(
            f"{_literal(_quoted(key))} COLON {self._rule(values[key])}"
            f" {name}more::set_bit({bit}) %if bit_clear({bit})"
            for bit, key in enumerate(keys)
        )
        run = f"({additional}) (COMMA ({additional}))*"
        done = f'"" %if is_ones([0:{len(required)}])' if required else '""'
        if not keys:
            self._say(name, f'"{{" ({run})? "}}"' if additional else '"{" "}"')
            return
        self._say(name, f'"{{" {name}next::0 "}}"' + ("" if required else ' | "{" "}"'))
        # After the last key of a closed object a comma would lead nowhere.
        every = (1 << len(keys)) - 1
        left = "" if additional else f" %if ne([0:{len(keys)}], {every})"
        self._say(f"{name}more::_", f"{done} | COMMA {name}next::_{left}")
        if not additional:
            self._say(f"{name}next::_", once)
            return
        # In runs, so that what the parser keeps doesn't grow with the square of their number.
        self._say(f"{name}next::_", f"{name}key::_ | {name}run {name}rest::_")
        self._say(f"{name}key::_", once)
        self._say(f"{name}run", run)
        self._say(f"{name}rest::_", f"{done} | COMMA {name}key::_")

    def _additional(self, node: Node) -> str | None:
        """The members of an object that aren't declared; None if they can't be told apart."""
        properties = node.get("properties", {})
        patterns = dict(node.get("patternProperties", {}))
        rest = node.get("additionalProperties", True)
        # A pattern of every name is about the declared ones too.
        if list(patterns) == [""] and all(_same(v, patterns[""]) for v in properties.values()):
            rest = patterns.pop("")
        if patterns and rest is not False:
            return None
        members = []
        for pattern, value in patterns.items():
            others = [other for other in patterns if other != pattern]
            both = [key for key in properties if _overlap(pattern, regex_sets.literal(key))]
            if any(_overlap(pattern, other) for other in others) or not names.fit(both):
                return None
            # What is declared besides was merged with the pattern's schema, if only by `required`.
            if not all(_same(properties[key], value) for key in both):
                return None
            key: Node = {"type": "string", "pattern": pattern}
            if both:
                key["allOf"] = [{"pattern": names.other_than(both)}]
            if value is not False:
                members.append(f"{self._rule(key)} COLON {self._rule(value)}")
        if rest is not False:
            members.append(f"{self._other_key(list(properties))} COLON {self._rule(rest)}")
        return " | ".join(members)

    def _other_key(self, keys: list[str]) -> str:
        """The name of the terminal for every key but some."""
        if not keys:
            return "STRING"
        name, is_new = self._name(keys, "KEY")
        if is_new:
            self._say(name, f"STRING & ~({' | '.join(_literal(_quoted(key)) for key in keys)})")
        return name

    def _is_narrow(self, node: Node) -> bool:
        """Whether few enough objects can go side by side, here or further down."""
        seen: set[frozenset[int]] = set()
        pending = [self._beginnings([node])]
        while pending:
            objects = pending.pop()
            if len(objects) < 2 or frozenset(objects) in seen:
                continue
            seen.add(frozenset(objects))
            keys = {key for node in objects.values() for key in node.get("properties", ())}
            items = sum(8 + len(node.get("properties", ())) for node in objects.values())
            if items > _MOST_ITEMS or len(seen) > _MOST_SETS:
                return False
            for key in [*keys, None]:
                values = [value for node in objects.values() for value in _values(node, key)]
                pending.append(self._beginnings(values))
        return True

    def _beginnings(self, nodes: list[Schema]) -> dict[int, Node]:
        """The objects, by identity, that a value of one of some schemas may be in at its start."""
        found: dict[int, Node] = {}
        pending, seen = list(nodes), set()
        while pending:
            node = pending.pop()
            if isinstance(node, bool) or id(node) in seen:
                continue
            seen.add(id(node))
            name = reference_name(node)
            if name is not None:
                pending.append(self._definitions[name])
            pending += [
                *node.get("anyOf", ()),
                *node.get("prefixItems", ()),
                node.get("items", True),
            ]
            if {"properties", "additionalProperties", "patternProperties"} & node.keys():
                found[id(node)] = node
        return found


def _values(node: Node, key: str | None) -> list[Schema]:
    """The schemas of an object's property; None means one that isn't declared."""
    if key in node.get("properties", {}):
        return [node["properties"][key]]
    return [*node.get("patternProperties", {}).values(), node.get("additionalProperties", True)]


def _nodes(schema: Schema) -> list[Node]:
    return [node for _, node in subschemas(schema) if isinstance(node, dict)]


def _same(schema: Schema, other: Schema) -> bool:
    return json.dumps(schema) == json.dumps(other)


def _overlap(pattern: str, other: str) -> bool:
    return not regex_sets.disjoint(pattern, other)


def _quoted(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def _literal(text: str) -> str:
    """A text in Lark, which quotes as JSON does."""
    return json.dumps(text, ensure_ascii=False)
