"""Which draft a schema is written in, and whether it is a schema of that draft.

`$schema` says which; without it, it is the newest that the schema is valid in. Keywords newer than
a draft are taken as they were meant (`const` in draft 4), so they have to be well-formed too, of
which the draft's own meta-schema says nothing.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import jsonschema
from jsonschema.protocols import Validator

from grammar_service.errors import Invalid
from grammar_service.grammars.schema.walk import escape, subschemas

_VALIDATORS: dict[int, type[Validator]] = {
    2020: jsonschema.Draft202012Validator,
    2019: jsonschema.Draft201909Validator,
    7: jsonschema.Draft7Validator,
    6: jsonschema.Draft6Validator,
    4: jsonschema.Draft4Validator,
}
_DIALECT = re.compile(
    r"^https?://json-schema\.org/(?:draft/(2020-12|2019-09)|draft-0([467]))/schema#?$"
)
_NEWEST = re.compile(r"^https?://json-schema\.org/schema#?$")
"""The address that names no draft."""


def dialect_of(schema: Any) -> int:
    """The dialect of a schema. Raises Invalid if it isn't valid in it, or there is no such draft.

    Args:
        schema: An object or a boolean, not nested deeply.
    """
    declared = _declared(schema)
    found: Invalid | None = None
    for dialect in _VALIDATORS if declared is None else [declared]:
        error = next(_meta(dialect).iter_errors(schema), None)
        if error is None:
            found = _ill_formed(schema)
            if found is None:
                return dialect
            break  # older drafts know no more
        # What the newest draft says: it knows the most.
        found = found or _not_valid(error)
    assert found is not None
    raise found


def _declared(schema: Any) -> int | None:
    if not isinstance(schema, dict) or "$schema" not in schema:
        return None
    address = str(schema["$schema"])
    if _NEWEST.match(address):
        return None
    match = _DIALECT.match(address)
    if not match:
        drafts = "draft-04, draft-06, draft-07, draft/2019-09 and draft/2020-12"
        raise Invalid(
            "SPEC_INVALID",
            f"the schema at /$schema: {address[:200]!r} isn't a draft that is read; those are "
            f"{drafts} of json-schema.org, or leave $schema out",
        )
    return int((match[1] or match[2])[:4])


@lru_cache(maxsize=8)
def _meta(dialect: int) -> Validator:
    kind = _VALIDATORS[dialect]
    return kind(kind.META_SCHEMA)


def _not_valid(error: Any) -> Invalid:
    error = jsonschema.exceptions.best_match([error]) or error
    pointer = "".join(f"/{escape(str(part))}" for part in error.absolute_path)
    hint = ""
    if error.absolute_path and error.absolute_path[-1] == "required":
        hint = "; `required` is a list of names, beside `properties`"
    message = f"{error.message[:200]}{hint}; correct it"
    return Invalid("SPEC_INVALID", f"the schema at {pointer or '/'}: {message}")


def _schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _named(value: Any, inner: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(inner, value.values()))


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _count(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and value >= 0


_SHAPES: tuple[tuple[Iterable[str], str, Callable[[Any], bool]], ...] = (
    (
        ("contains", "propertyNames", "if", "then", "else", "unevaluatedItems",
         "unevaluatedProperties"),
        "a schema", _schema,
    ),
    (
        ("prefixItems",), "a list of schemas, one at least",
        lambda value: isinstance(value, list) and bool(value) and all(map(_schema, value)),
    ),
    (
        ("$defs", "dependentSchemas"), "an object of schemas",
        lambda value: _named(value, _schema),
    ),
    (
        ("dependentRequired",), "an object of lists of names",
        lambda value: _named(value, _names),
    ),
    (("minContains", "maxContains"), "a whole number, not negative", _count),
    (
        ("$ref", "$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
        "a string", lambda value: isinstance(value, str),
    ),
)  # fmt: skip
"""Keywords that draft 4 doesn't know: what their values are."""
_SHAPE = {key: (what, fits) for keys, what, fits in _SHAPES for key in keys}


def _ill_formed(schema: Any) -> Invalid | None:
    """The refusal of a keyword newer than the draft that isn't what it is in its own draft."""
    for pointer, node in subschemas(schema):
        for key in node.keys() & _SHAPE.keys() if isinstance(node, dict) else ():
            what, fits = _SHAPE[key]
            if not fits(node[key]):
                text = f"the schema at {pointer}/{key}: it has to be {what}; correct it"
                return Invalid("SPEC_INVALID", text)
    return None
