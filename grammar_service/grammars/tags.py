"""Structural tags: the schemas and expressions in them are read as those that stand alone.

Measured with xgrammar 0.2.9, each in tests/grammars/test_tags.py:
- In a tag an object is closed where it doesn't say that it is open. So it is made to say so, except
  the arguments themselves in a style of XML: there a declared key may come as an additional one
  too, with any value that those may have. Such an object stays closed, which is narrower, and where
  it says that it is open, its `properties` aren't enforced. Cohere's and Gemma's styles are exact.
- MiniMax M3's style refuses open objects at any depth, and strings with bounds.
- Gemma's style drops the bounds of a string's length, as `excludes` does in each style.
- With `any_order` a key may come twice, and a required one not at all.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from grammar_service.errors import Invalid, Unenforced
from grammar_service.grammars.schema import (
    Limits,
    Rewritten,
    check,
    forms,
    rewrite,
    unenforced,
    unenforced_formats,
)
from grammar_service.grammars.schema.walk import References, escape, subschemas
from grammar_service.grammars.spec import expression

_HIDING = {
    "qwen_xml", "minimax_xml", "deepseek_xml", "deepseek_v4_1_xml", "glm_xml", "kimi_k3_xml",
}  # fmt: skip
"""Styles in which a declared key may come as an additional one."""
_CLOSED = "minimax_m3_xml"
_LENGTHS = {"minLength", "maxLength"}
_LARK_SCHEMA = re.compile(r"%json\b")


@dataclass(slots=True)
class Read:
    """What was found in a tag: its parts that no mask would enforce, and the formats likewise."""

    unenforced: list[Unenforced] = field(default_factory=list)
    annotations: list[Unenforced] = field(default_factory=list)


def read_tag(tag: Any, limits: Limits, close_objects: bool) -> Read:
    """Reads a tag, and puts its schemas and expressions into the form that xgrammar is given.

    Raises Invalid.
    """
    found = Read()
    stack: list[tuple[str, Any]] = [("", tag)]
    while stack:
        pointer, node = stack.pop()
        if isinstance(node, list):
            stack += [(f"{pointer}/{index}", item) for index, item in enumerate(node)]
        if not isinstance(node, dict):
            continue
        stack += [
            (f"{pointer}/{escape(key)}", item) for key, item in node.items() if key != "json_schema"
        ]
        if node.get("type") == "regex" and isinstance(node.get("pattern"), str):
            node["pattern"] = expression(node["pattern"], f"{pointer}/pattern: ")
        if _LARK_SCHEMA.search(str(node.get("grammar", ""))):
            raise Invalid(
                "SPEC_UNSUPPORTED",
                f"{pointer}/grammar: a schema in a tag stands in a format of type json_schema, "
                "where it is read, not behind %json",
            )
        if "json_schema" in node:
            _name_style(pointer, node)
            _read_schema(pointer, node, limits, close_objects, found)
    return found


def _name_style(pointer: str, node: dict[str, Any]) -> None:
    """Makes a format that has a schema one of type json_schema, in the style that it is in."""
    match node.get("type"):
        case "json_schema":
            if not isinstance(node.get("style"), str):  # xgrammar takes what isn't text so
                node["style"] = "json"
        case "qwen_xml_parameter":  # the older name, which xgrammar reads likewise
            node.update(type="json_schema", style="qwen_xml")
        case other:
            # xgrammar guesses what a format without a type is, and others have no schema yet.
            raise Invalid(
                "SPEC_INVALID",
                f"{pointer or '/'}: a format with a json_schema has the type json_schema, "
                f"not {str(other)[:40]!r}",
            )


def _read_schema(
    pointer: str, node: dict[str, Any], limits: Limits, close_objects: bool, found: Read
) -> None:
    schema, style = node["json_schema"], node["style"]
    rewritten = rewrite(schema, check(schema, limits), close_objects)
    at = f"{pointer}/json_schema"
    missing = [*unenforced(rewritten, "xgrammar"), *_dropped(rewritten, node)]
    found.unenforced += [Unenforced(at + p, k) for p, k in dict.fromkeys(missing)]
    formats = unenforced_formats(rewritten, "xgrammar")
    found.annotations += [Unenforced(at + p, k) for p, k in formats]
    form = forms(rewritten.schema, "xgrammar")[0]
    if style != _CLOSED:
        form = _opened(form, _outer(form) if style in _HIDING else set())
    node["json_schema"] = form


def _dropped(rewritten: Rewritten, node: dict[str, Any]) -> list[Unenforced]:
    """What xgrammar drops of a schema in a tag and enforces in one that stands alone."""
    outer = _outer(rewritten.schema) if node["style"] in _HIDING else set()
    dropped = set(_LENGTHS) if node["style"] == "gemma" or node.get("excludes") else set()
    dropped |= {"required"} if node.get("any_order") else set()
    return [
        Unenforced(rewritten.origin(pointer), keyword)
        for pointer, inner in subschemas(rewritten.schema)
        if isinstance(inner, dict)
        for keyword in inner
        if (keyword in dropped and inner[keyword] != [])
        or (
            keyword == "properties"
            and pointer in outer
            and inner.get("additionalProperties", False) is not False
        )
    ]


def _outer(schema: Any) -> set[str]:
    """Pointers of the schemas of the arguments themselves, rather than of a value in them."""
    references = References(schema)
    found: set[str] = set()
    stack: list[str | None] = [""]
    while stack:
        pointer = stack.pop()
        if pointer is None or pointer in found:
            continue
        found.add(pointer)
        node = references.at(pointer)
        if not isinstance(node, dict):
            continue
        if isinstance(node.get("$ref"), str):
            stack.append(references.resolve(node["$ref"]))
        for key in ("anyOf", "allOf", "oneOf"):
            stack += [f"{pointer}/{key}/{index}" for index in range(len(node.get(key, ())))]
    return found


def _opened(schema: Any, but: set[str], pointer: str = "") -> Any:
    """A rewritten schema in which each object says what else it takes, but those with properties.

    `but` are the pointers of the latter.
    """
    if isinstance(schema, list):
        return [_opened(item, but, f"{pointer}/{index}") for index, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    opened: dict[str, Any] = {}
    for key, value in schema.items():
        at = f"{pointer}/{escape(key)}"
        if key in ("properties", "patternProperties", "$defs"):
            opened[key] = {
                name: _opened(inner, but, f"{at}/{escape(name)}") for name, inner in value.items()
            }
        else:
            opened[key] = value if key in ("enum", "required") else _opened(value, but, at)
    stays = pointer in but and "properties" in schema
    if schema.get("type") == "object" and "unevaluatedProperties" not in schema and not stays:
        opened.setdefault("additionalProperties", True)
    return opened
