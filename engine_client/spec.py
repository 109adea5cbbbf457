"""Grammar specs: what a caller wants its text to be. The service's and the client's word alike."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypedDict, Unpack

DEFAULT_MAX_WHITESPACE = 8


class GrammarType(StrEnum):
    """What a source is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    LARK = "lark"


class SpecOptions(TypedDict, total=False):
    """The options that every kind of spec takes; see GrammarSpec."""

    max_whitespace: int
    close_objects: bool
    allow_unenforced: bool
    fixed_key_order: bool
    strict_formats: bool
    item_separator: str
    key_separator: str
    backend: str


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar spec; the class methods make one of each kind.

    Attributes:
        type: What `source` is written in.
        source: The text; empty for json_object and choice.
        choices: The texts of a choice.
        max_whitespace: White-space characters in a row that JSON may have, 0 (none) to 1,000.
        close_objects: Whether objects that name properties, and don't say additionalProperties, are
            closed.
        allow_unenforced: Whether a schema may have parts that no mask enforces.
        fixed_key_order: Whether keys come in the order of `properties`, or the required ones first,
            only.
        strict_formats: Whether a format that isn't enforced counts as unenforced.
        item_separator: What stands between items; another than "," only with max_whitespace 0.
        key_separator: What stands between a key and its value; likewise, ":".
        backend: "auto", or the name of a backend.
    """

    type: GrammarType
    source: str = ""
    choices: tuple[str, ...] = ()
    max_whitespace: int = DEFAULT_MAX_WHITESPACE
    close_objects: bool = False
    allow_unenforced: bool = False
    fixed_key_order: bool = False
    strict_formats: bool = False
    item_separator: str = ","
    key_separator: str = ":"
    backend: str = "auto"

    @classmethod
    def json_schema(
        cls, schema: dict[str, Any] | bool | str, **options: Unpack[SpecOptions]
    ) -> Self:
        """A JSON text that a schema, as an object or as JSON, describes."""
        source = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls(GrammarType.JSON_SCHEMA, source, **options)

    @classmethod
    def json_object(cls, **options: Unpack[SpecOptions]) -> Self:
        """Any JSON object."""
        return cls(GrammarType.JSON_OBJECT, **options)

    @classmethod
    def regex(cls, pattern: str, **options: Unpack[SpecOptions]) -> Self:
        """A text that the whole of a regular expression matches."""
        return cls(GrammarType.REGEX, pattern, **options)

    @classmethod
    def choice(cls, choices: Sequence[str], **options: Unpack[SpecOptions]) -> Self:
        """One of some texts."""
        return cls(GrammarType.CHOICE, choices=tuple(choices), **options)

    @classmethod
    def ebnf(cls, grammar: str, **options: Unpack[SpecOptions]) -> Self:
        """A text of a grammar in GBNF, whose start is the rule `root`."""
        return cls(GrammarType.EBNF, grammar, **options)

    @classmethod
    def lark(cls, grammar: str, **options: Unpack[SpecOptions]) -> Self:
        """A text of a grammar in Lark, as llguidance speaks it, whose start is the rule `start`."""
        return cls(GrammarType.LARK, grammar, **options)

    @classmethod
    def structural_tag(cls, tag: dict[str, Any] | str, **options: Unpack[SpecOptions]) -> Self:
        """Free text with tags in it, in xgrammar's structural tag format."""
        source = tag if isinstance(tag, str) else json.dumps(tag, ensure_ascii=False)
        return cls(GrammarType.STRUCTURAL_TAG, source, **options)
