r"""Which keywords of a rewritten schema each library doesn't enforce, and where they were.

Measured with xgrammar 0.2.9, llguidance 1.9.1 and outlines-core 0.2.14: for each rule
tests/grammars/schema/test_libraries.py has a schema and a text that it forbids. The rules err on
the side of naming: what is enforced in some shapes only is named in all others.

llguidance refuses what it doesn't know, so most of its rules only foretell that, with a pointer.

One gap isn't named, since it would name every open object: with xgrammar, and with llguidance
beside `patternProperties` in an open object, a declared key written with an escape (`"\u0061"` for
`"a"`) counts as an additional one. No model writes so unless it is made to.
"""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from grammar_service.errors import Unenforced
from grammar_service.grammars.regex import NOTHING, RegexError, read
from grammar_service.grammars.schema import regex_sets
from grammar_service.grammars.schema.formats import OUTLINES_FORMATS, PATTERNS, only_format
from grammar_service.grammars.schema.forms import LLGUIDANCE_FORMATS
from grammar_service.grammars.schema.modern import KEYWORD_TYPE
from grammar_service.grammars.schema.rewrite import Rewritten
from grammar_service.grammars.schema.walk import Node, subschemas

BACKENDS = ("llguidance", "xgrammar", "outlines")
"""In the order of `auto`: the soonest ready first."""

_XGRAMMAR_MULTIPLE = 1024
"""The largest whole number that it counts in; it drops the others."""
_CONDITIONAL = {
    "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "uniqueItems", "contains", "minContains", "maxContains",
    "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_ASSERTIONS = {*KEYWORD_TYPE, *_CONDITIONAL, "type", "enum", "$ref", "anyOf", "allOf"} - {"format"}
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_BOUNDS = ("minimum", "maximum", *_EXCLUSIVE)
_FORMATS = {
    "llguidance": LLGUIDANCE_FORMATS | PATTERNS.keys(),
    "xgrammar": LLGUIDANCE_FORMATS
    | {"uri-reference", "uri-template", "json-pointer", "relative-json-pointer"},
    "outlines": OUTLINES_FORMATS,
}


def unenforced_keywords(node: Node, backend: str) -> set[str]:
    """The keywords of one node that a library's masks won't enforce."""
    return _RULES[backend](node)


def unenforced(rewritten: Rewritten, backend: str) -> list[Unenforced]:
    """The keywords that a library's masks won't enforce; empty where it enforces all of them.

    Pointers lead into the original schema: to the node that the keyword, or what it became, is of.
    """
    rules = _RULES[backend]
    found = [
        Unenforced(rewritten.origin(pointer), keyword)
        for pointer, node in subschemas(rewritten.schema)
        if isinstance(node, dict)
        for keyword in node
        if keyword in rules(node)
    ]
    return list(dict.fromkeys(found))


def unenforced_formats(rewritten: Rewritten, backend: str) -> list[Unenforced]:
    """The formats, annotations by the standard, that a library's masks don't enforce."""
    return [
        Unenforced(rewritten.origin(pointer), "format")
        for pointer, node in subschemas(rewritten.schema)
        if isinstance(node, dict) and "format" in node
        and (node["format"] not in _FORMATS[backend] or _is_second(pointer, node, backend))
    ]  # fmt: skip


def _is_second(pointer: str, node: Node, backend: str) -> bool:
    """Whether this is a text's second format: llguidance alone has both."""
    in_list = re.search(r"/allOf/\d+$", pointer)
    return backend != "llguidance" and bool(in_list) and only_format(node)


def refusal(message: str, rewritten: Rewritten) -> Unenforced | None:
    """Where a library's refusal points to, as far as its message says so.

    Only a keyword that the schema has: the messages' English has words like "type" and "if". None
    if the schema has no keyword at all.
    """
    pointer = ""
    place = re.search(r"json-schema:///#(/\S*)", message)
    if place:
        pointer = place[1]
    nodes = [(at, node) for at, node in subschemas(rewritten.schema) if isinstance(node, dict)]
    nodes = [(at, node) for at, node in nodes if at == pointer or not place] or nodes
    present = {key for _, node in nodes for key in node if key in _ASSERTIONS}
    named = re.search(r'Unimplemented keys: \["([^"]+)', message)
    keyword = ""
    if named:
        keyword = named[1]
    elif "circular references" in message:
        keyword = "$ref"
    if keyword not in present:
        words = [word for word in re.findall(r"[A-Za-z$]+", message) if word in present]
        # A bound or a pattern is a likelier reason than a type is.
        keyword = next(iter([*words, *sorted(present - {"type"}), *present]), "")
    if not keyword:
        return None
    pointer = next(at for at, node in nodes if keyword in node)
    return Unenforced(rewritten.origin(pointer), keyword)


def _llguidance(node: Node) -> set[str]:
    found = (_CONDITIONAL | {"propertyNames"}) & node.keys()
    found |= _irregular(node) | _lost_bounds(node)
    optional = [name for name in node.get("properties", {}) if name not in node.get("required", ())]
    closed = node.get("additionalProperties", True) is False and "patternProperties" not in node
    # It counts a key that is repeated twice, and only what isn't declared (for maxProperties,
    # `forms` has a way around that, and the library refuses where it hasn't).
    if node.get("minProperties", 0) > 1 or ("minProperties" in node and optional and not closed):
        found.add("minProperties")
    return found


def _xgrammar(node: Node) -> set[str]:
    asserted = _asserted(node)
    found = _CONDITIONAL & asserted
    found |= _irregular(node) | _overlapping_patterns(node)
    if "allOf" in asserted:
        found.add("allOf")
    # What it looks at first hides the rest.
    hiding = next((key for key in ("$ref", "enum", "anyOf") if key in node), None)
    if hiding:
        found |= asserted - {hiding}
    kinds = _kinds(node)
    if not kinds:
        # Without a type some are read as that of their type, and the others not at all.
        read = {"properties", "items", "prefixItems", "additionalProperties"}
        found |= {key for key in asserted & KEYWORD_TYPE.keys() if key not in read}
    if {"properties", "patternProperties"} <= node.keys():
        others = node.get("additionalProperties", True)
        if others is not False and (isinstance(others, dict) or not node.get("required")):
            found |= {"properties", "patternProperties"}
    ranges = {*_BOUNDS} & node.keys()
    multiple = node.get("multipleOf", 1)
    counts = multiple == int(multiple) <= _XGRAMMAR_MULTIPLE
    if "multipleOf" in node and (kinds != {"integer"} or ranges or not counts):
        found.add("multipleOf")
    if {"pattern", "format"} & node.keys():
        found |= {"minLength", "maxLength"} & asserted
    if {"pattern", "format"} <= node.keys():
        found.add("pattern")
    properties = node.get("properties", {})
    if any(name not in properties for name in node.get("required", ())):
        found.add("required")
    if "propertyNames" in node and node.get("additionalProperties") is False:
        found |= {"propertyNames", "additionalProperties"}
    if "propertyNames" in node and (properties or "patternProperties" in node):
        found |= {"propertyNames", "properties"} & node.keys()
    if node.get("minProperties", 0) > 1:
        found.add("minProperties")
    return found


def _outlines(node: Node) -> set[str]:
    asserted = _asserted(node)
    known = {"type", "enum", "$ref", "anyOf", "properties", "required", "items"}
    hiding = next((key for key in ("$ref", "enum", "anyOf") if key in node), None)
    # The keys of values aren't escaped in its expression.
    if hiding == "enum" and not all(map(_has_plain_keys, node["enum"])):
        return asserted
    if hiding:
        return asserted - {hiding}
    kinds = _kinds(node)
    if kinds == {"string"} and "format" not in node:
        known |= {"pattern"} if "pattern" in node else {"minLength", "maxLength"}
    if kinds == {"array"} and "prefixItems" not in node:
        known |= {"minItems", "maxItems"}
    found = asserted - known | _irregular(node)
    if isinstance(node.get("additionalProperties"), bool) and "properties" in node:
        found.discard("additionalProperties")
    properties = node.get("properties", {})
    if any(name not in properties for name in node.get("required", ())):
        found.add("required")
    # Names are put into its expression as they are, escapes and all.
    if any(not re.fullmatch(r"[ -!#-\[\]-~]*", name) for name in properties):
        found.add("properties")
    if len(kinds) > 1 or not kinds:
        found |= asserted & KEYWORD_TYPE.keys()
    return found


def _has_plain_keys(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_has_plain_keys, value))
    return not isinstance(value, dict) or all(
        re.fullmatch("[A-Za-z0-9_ -]*", key) and _has_plain_keys(inner)
        for key, inner in value.items()
    )


def _asserted(node: Node) -> set[str]:
    """The keywords that assert something: formats, also a list of them, are annotations."""
    asserted = _ASSERTIONS & node.keys()
    return asserted - {"allOf"} if all(map(only_format, node.get("allOf", ()))) else asserted


def _lost_bounds(node: Node) -> set[str]:
    """Bounds of which llguidance takes an exclusive one for inclusive.

    It does with a whole number where the other bound lies before the next one, further from zero.
    """
    beside = [node, *_beside(node)]
    # A float and a whole number of 400 digits have no difference otherwise.
    whole = [Fraction(part[key]) for part in beside for key in _EXCLUSIVE
             if part.get(key, 0.5) % 1 == 0]  # fmt: skip
    others = [Fraction(part[key]) for part in beside for key in _BOUNDS if key in part]
    lost = "$ref" in node or any(
        one * other >= 0 and 0 < abs(other) - abs(one) < 1 for one in whole for other in others
    )
    return {"allOf", *_BOUNDS} & node.keys() if lost else set()


def _beside(node: Node) -> Iterator[Node]:
    """What a library merges into a node; where references lead isn't looked at."""
    for branch in (*node.get("allOf", ()), *node.get("anyOf", ())):
        if isinstance(branch, dict):
            yield branch
            yield from _beside(branch)


def _kinds(node: Node) -> set[str]:
    kind: Any = node.get("type", [])
    return set(kind) if isinstance(kind, list) else {kind}


def _irregular(node: Node) -> set[str]:
    found = set()
    if "pattern" in node and not _regular(node["pattern"]):
        found.add("pattern")
    if not all(map(_regular, node.get("patternProperties", {}))):
        found.add("patternProperties")
    return found


def _regular(pattern: str) -> bool:
    try:
        return read(pattern, search=True) != NOTHING
    except RegexError:
        return False


def _overlapping_patterns(node: Node) -> set[str]:
    """A name that two patterns, or a pattern and a property, look at, is looked at once only."""
    patterns = list(node.get("patternProperties", {}))
    names = [regex_sets.literal(name) for name in node.get("properties", {})]
    overlap = any(
        not regex_sets.disjoint(pattern, other)
        for i, pattern in enumerate(patterns)
        for other in (*patterns[i + 1 :], *names)
    )
    return {"patternProperties"} if overlap else set()


_RULES: dict[str, Callable[[Node], set[str]]] = {
    "llguidance": _llguidance,
    "xgrammar": _xgrammar,
    "outlines": _outlines,
}
