"""Grammar specs: what is compiled, in a canonical form, and its id.

The id is a hash of the canonical spec, its options, the tokenizer id and the versions of the
backends that it may come to, so that two replicas name the same grammar alike, and no others.
"""

import dataclasses
import hashlib
import json
import math
import re
import unicodedata
from typing import Any, NoReturn

from engine_client.spec import GrammarSpec, GrammarType
from grammar_service.errors import Invalid
from grammar_service.grammars.regex import NOTHING, Malformed, RegexError, read, write
from grammar_service.grammars.schema.normalise import normalise

MAX_WHITESPACE = 1000
EXPRESSION = "a regular expression (no look-around, no back references)"
_READING = 4
"""Goes up when specs come to mean something else, so that ids tell the two apart."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_TYPES = {GrammarType.JSON_SCHEMA, GrammarType.STRUCTURAL_TAG}


def grammar_id(spec: GrammarSpec, tokenizer_id: str, versions: str) -> str:
    """The id of a canonical spec's grammar, for a tokenizer and the backends' versions.

    Specs that differ in annotations, or in the order of keywords, have the same id.
    """
    options = dataclasses.astuple(spec)
    # Python's Unicode says what \p{…} is.
    parts = [*options, tokenizer_id, versions, _READING, unicodedata.unidata_version]
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"gra-{digest[:32]}"


def canonical(spec: GrammarSpec, max_bytes: int) -> GrammarSpec:
    """The spec in its canonical form: what is compiled, and what its id is made of.

    JSON is parsed and written compactly, key order kept; of a schema that only goes for names.

    Raises Invalid with SPEC_TOO_LARGE or SPEC_INVALID.
    """
    size = sum(len(text.encode("utf-8", "replace")) for text in (spec.source, *spec.choices))
    if size > max_bytes:
        raise Invalid(
            "SPEC_TOO_LARGE", f"the spec has {size} bytes; allowed are {max_bytes} (max_spec_bytes)"
        )
    if not 0 <= spec.max_whitespace <= MAX_WHITESPACE:
        raise Invalid("SPEC_INVALID", f"max_whitespace is 0 to {MAX_WHITESPACE}")
    if (spec.item_separator, spec.key_separator) != (",", ":") and spec.max_whitespace:
        raise Invalid("SPEC_INVALID", "separators of one's own go with max_whitespace 0")
    for separator, mark in ((spec.item_separator, ","), (spec.key_separator, ":")):
        if separator.strip(" \t\n\r") != mark:
            raise Invalid(
                "SPEC_INVALID",
                f"the separator {separator[:40]!r} isn't JSON: white space, {mark!r}, white space",
            )
    _check_parts(spec)
    if spec.type in _JSON_TYPES:
        value = parse_json(spec.source)
        if not isinstance(value, dict | bool):
            raise Invalid(
                "SPEC_INVALID", f"a {spec.type} is a JSON object, not {spec.source[:40]!r}"
            )
        source = dump_json(_normalised(value) if spec.type is GrammarType.JSON_SCHEMA else value)
        if _SURROGATE.search(source):
            raise Invalid("SPEC_INVALID", "the JSON has a lone surrogate, which is no character")
        spec = dataclasses.replace(spec, source=source)
    return spec


def _normalised(schema: Any) -> Any:
    try:
        return normalise(schema)
    except RecursionError:
        raise Invalid("SPEC_TOO_LARGE", "the JSON is nested too deeply") from None


def _check_parts(spec: GrammarSpec) -> None:
    takes_choices = spec.type is GrammarType.CHOICE
    takes_source = spec.type not in (GrammarType.CHOICE, GrammarType.JSON_OBJECT)
    if bool(spec.choices) != takes_choices or bool(spec.source) != takes_source:
        wants = "choices" if takes_choices else "a source" if takes_source else "no source"
        raise Invalid("SPEC_INVALID", f"a spec of type {spec.type} takes {wants}")
    if "" in spec.choices:
        raise Invalid("SPEC_INVALID", "a choice is empty; leave it out or use a regex")


def expression(pattern: str, place: str = "") -> str:
    """A regular expression, written out for all backends.

    Raises Invalid, whose message begins with the place.
    """
    try:
        tree = read(pattern)
        if tree == NOTHING:
            raise Malformed("no text matches it; look for an empty class, []")
    except RegexError as error:
        raise Invalid("SPEC_INVALID", f"{place}expected {EXPRESSION}: {error}") from None
    return write(tree)


def parse_json(text: str) -> Any:
    """Parses strict JSON: no NaN, no deep nesting. Raises Invalid with SPEC_INVALID."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise Invalid("SPEC_TOO_LARGE", "the JSON is nested too deeply") from None
    except ValueError as error:
        raise Invalid("SPEC_INVALID", f"the source is no JSON: {error}") from None


def dump_json(value: Any) -> str:
    """Writes JSON compactly, keys in their order."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise Invalid("SPEC_TOO_LARGE", "the JSON is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not in JSON")
