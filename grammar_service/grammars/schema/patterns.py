r"""The patterns of a schema, written anew, so that all who read them read the same.

Each library, and jsonschema, reads an expression in its own way: what `\d` is, whether it is
searched for or is the whole text, which anchors count. What they are given leaves that open
nowhere. xgrammar and outlines-core put an expression between the quotes of a JSON string as it is,
so theirs is one of the text as it stands there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from grammar_service.grammars.regex import ANYTHING, NOTHING, RegexError, in_json, read, write
from grammar_service.grammars.schema.formats import OUTLINES_FORMATS, only_format
from grammar_service.grammars.schema.walk import NAMED

Write = Callable[[str], str | None]
"""A pattern as it is to be; None for one that is left out, as nothing enforces it."""


def for_library(schema: Any, backend: str) -> Any:
    """The schema as a library reads it, without the formats that keep it from doing so."""
    if backend != "llguidance":
        schema = _without_formats(schema, OUTLINES_FORMATS if backend == "outlines" else None)
    return written(schema, partial(_for_library, backend))


def for_python(schema: Any) -> Any:
    """The schema as jsonschema reads it, which asks Python's `re`. Raises RegexError."""
    return written(schema, lambda pattern: rf"\A(?:{write(read(pattern, search=True))})\Z")


def written(schema: Any, write: Write) -> Any:
    """The schema with each pattern as `write` has it."""
    if isinstance(schema, list):
        return [written(item, write) for item in schema]
    if not isinstance(schema, dict):
        return schema
    new: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern":
            pattern = write(value)
            if pattern is not None:
                new[key] = pattern
        elif key == "patternProperties":
            new[key] = _properties(value, write)
        elif key in NAMED:
            new[key] = {name: written(inner, write) for name, inner in value.items()}
        else:
            new[key] = value if key in ("enum", "required") else written(value, write)
    return new


def _properties(patterns: dict[str, Any], write: Write) -> dict[str, Any]:
    new: dict[str, Any] = {}
    for pattern, value in patterns.items():
        schema = written(value, write)
        name = write(pattern)
        name = pattern if name is None else name
        # Two may come to be written alike.
        new[name] = {"allOf": [new[name], schema]} if name in new else schema
    return new


def _for_library(backend: str, pattern: str) -> str | None:
    try:
        tree = read(pattern, search=True)
    except RegexError:
        return None
    if backend == "llguidance":
        # Those who read it next know the pattern of every name by its being empty.
        return "" if tree == ANYTHING else f"^(?:{write(tree)})$"
    spelled = in_json(tree)
    if backend == "xgrammar":
        # It leaves out escapes unless all texts have some, and is slowed by them ten times.
        plain = in_json(tree, escapes=False)
        spelled = plain if plain != NOTHING else spelled
    return f"^(?:{write(spelled)})$"


def _without_formats(schema: Any, known: frozenset[str] | None) -> Any:
    """The schema with known formats, or any, and one for a text, which is what can be enforced."""
    if isinstance(schema, list):
        return [_without_formats(item, known) for item in schema]
    if not isinstance(schema, dict):
        return schema
    new: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED:
            new[key] = {name: _without_formats(inner, known) for name, inner in value.items()}
        elif key in ("enum", "required"):
            new[key] = value
        elif key == "allOf":
            branches = [inner for inner in value if not only_format(inner)]
            if branches:
                new[key] = _without_formats(branches, known)
        elif key != "format" or known is None or value in known:
            new[key] = _without_formats(value, known)
    return new
