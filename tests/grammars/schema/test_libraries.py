"""What the installed libraries do with texts that a schema forbids.

The last column has those that take the text: an upgrade that changes it fails here, and then the
rules in `enforcement` have to follow. Who takes a forbidden text must name a keyword, unless it is
one of the gaps that `enforcement` tells of.
"""

from typing import Any

import pytest

from grammar_service.grammars.schema import BACKENDS, Rewritten, forms, unenforced
from grammar_service.grammars.schema.enforcement import unenforced_formats
from tests.grammars.schema.texts import Refused, Texts

_I = {"type": "integer"}
_ALL = "llguidance xgrammar outlines"
_FORBIDDEN: list[tuple[Any, str, str]] = [
    ({"type": "object", "properties": {"a": _I}}, '{"\\u0061":"x"}', "xgrammar"),
    ({"type": "object", "properties": {"a": _I, "b": _I}}, '{"b":1,"a":"x"}', ""),
    (
        {"type": "object", "properties": {"a": _I}, "additionalProperties": False},
        '{"\\u0061":"x"}',
        "",
    ),
    ({"type": "object", "patternProperties": {"^a": _I}}, '{"\\u0061":"x"}', "llguidance"),
    ({"type": "object", "patternProperties": {"^a": _I}}, '{"ab":"x"}', "outlines"),
    (
        {"type": "object", "patternProperties": {"^a": _I}, "additionalProperties": False},
        '{"\\u0061":"x"}',
        "",
    ),
    (
        {"type": "object", "patternProperties": {"a": _I}, "additionalProperties": False},
        '{"ba":"x"}',
        "",
    ),
    (
        {
            "type": "object",
            "patternProperties": {"a": _I},
            "properties": {"ab": {"minimum": 3}},
            "additionalProperties": False,
        },
        '{"ab":"x"}',
        "xgrammar",
    ),
    ({"type": "object", "minProperties": 2}, '{"a":1,"a":2}', _ALL),
    ({"type": "object", "minProperties": 1}, "{}", ""),
    ({"type": "object", "minProperties": 1, "properties": {"a": _I, "b": _I}}, "{}", "outlines"),
    ({"type": "object", "maxProperties": 1}, '{"a":1,"b":2}', "outlines"),
    (
        {"type": "object", "maxProperties": 2, "properties": {"a": _I}, "required": ["a"]},
        '{"a":1,"b":2,"c":3}',
        "",
    ),
    (
        {"type": "object", "maxProperties": 1, "properties": {"a": _I, "b": _I}},
        '{"a":1,"b":2}',
        "outlines",
    ),
    ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, '{"b":1}', "outlines"),
    ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, '{"\\u0062":1}', ""),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, '{"b":1}', "outlines"),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, '{"bb":1}', "outlines"),
    ({"type": "object", "required": ["a"]}, "{}", "xgrammar outlines"),
    (
        {"type": "object", "required": ["a"], "properties": {"b": _I}},
        '{"b":1}',
        "xgrammar outlines",
    ),
    ({"type": "object", "required": ["a"], "additionalProperties": _I}, '{"a":"x"}', ""),
    ({"type": "object", "properties": {"a": False, "b": _I}}, '{"a":1}', ""),
    (
        {"type": "object", "properties": {"a": False}, "patternProperties": {"^x": _I}},
        '{"a":1}',
        "",
    ),
    *(
        (
            {"type": "object", "properties": {"a": True}, "patternProperties": {every: _I}},
            '{"a":"x"}',
            "xgrammar",
        )
        for every in ("", "^", ".*", "[^]*", "(?s:.*)")
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": False},
        '{"a":1}',
        "xgrammar",
    ),
    ({"type": "string", "pattern": "b"}, '"ac"', ""),
    ({"type": "string", "pattern": "^a|b$"}, '"xa"', ""),
    ({"type": "string", "pattern": "^(a|b)$", "maxLength": 0}, '"a"', "xgrammar"),
    ({"type": "string", "pattern": "a$"}, '"ab"', ""),
    ({"type": "string", "pattern": "^.$"}, '"\\n"', ""),
    ({"type": "string", "pattern": "^[^a]$"}, '"a"', ""),
    ({"type": "string", "pattern": "^[^a]$"}, '"\\u0061"', ""),
    ({"type": "string", "pattern": "^\\S+$"}, '"a b"', ""),
    ({"type": "string", "pattern": "^\\S+$"}, '"\\t"', ""),
    ({"type": "string", "pattern": "^[^\\t]$"}, '"\\t"', ""),
    ({"type": "string", "pattern": "^\\W$"}, '"\\u0061"', ""),
    ({"type": "string", "pattern": "\\bfoo\\b"}, '"xfoox"', _ALL),
    ({"type": "string", "pattern": "^(?!a).*$"}, '"a"', _ALL),
    ({"type": "string", "pattern": "^(a)\\1$"}, '"ab"', _ALL),
    ({"type": "string", "pattern": "a^b"}, '"ab"', _ALL),
    ({"type": "string", "pattern": "(^|,)a$"}, '"ba"', ""),
    ({"type": "string", "pattern": "^\\d$"}, '"٤"', ""),
    ({"type": "string", "pattern": "^\\w$"}, '"é"', ""),
    ({"type": "string", "pattern": "^.$"}, '"\u2028"', ""),
    ({"type": "object", "patternProperties": {"^\\d$": _I}}, '{"1":"x"}', "outlines"),
    (
        {"type": "object", "patternProperties": {"^\\d$": _I}, "additionalProperties": False},
        '{"٤":1}',
        "",
    ),
    ({"type": "object", "propertyNames": {"pattern": "^\\d$"}}, '{"٤":1}', "outlines"),
    ({"type": "string", "maxLength": 1}, '"ab"', ""),
    ({"type": "string", "minLength": 2}, '"\\u00e9"', ""),
    ({"type": "string", "minLength": 2}, '"é"', ""),
    ({"type": "string", "minLength": 2}, '"\\n"', ""),
    ({"type": "integer", "minimum": 2, "maximum": 13}, "1", "outlines"),
    ({"type": "integer", "minimum": 2, "maximum": 13}, "14", "outlines"),
    ({"type": "integer", "minimum": 2}, "-5", "outlines"),
    ({"type": "integer", "exclusiveMinimum": 2}, "2", "outlines"),
    ({"type": "number", "minimum": 0.5}, "0.4", "outlines"),
    ({"type": "number", "maximum": 5}, "1e2", ""),
    ({"type": "number", "maximum": 5}, "5.1", "outlines"),
    ({"type": "number", "exclusiveMaximum": 5}, "5.0", "outlines"),
    ({"type": "number", "exclusiveMaximum": 5}, "5", "outlines"),
    ({"exclusiveMinimum": 5, "exclusiveMaximum": 5.5}, "5", "llguidance xgrammar"),
    ({"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}, "5", "llguidance outlines"),
    (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        "0",
        "llguidance outlines",
    ),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "-0", "llguidance outlines"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0", "outlines"),
    ({"type": "number", "exclusiveMinimum": -5, "maximum": -4.5}, "-5", "outlines"),
    (
        {"maximum": 5.5, "anyOf": [{"type": "number", "exclusiveMinimum": 5}, {"type": "null"}]},
        "5",
        "llguidance outlines",
    ),
    ({"type": "number", "minimum": 10000000000.0}, "3", "outlines"),
    ({"type": "number", "minimum": 1e-07}, "0", "outlines"),
    ({"type": "integer", "maximum": 1.5}, "2", "outlines"),
    ({"type": "integer", "multipleOf": 3}, "4", "outlines"),
    ({"type": "integer", "multipleOf": 1024}, "1025", "outlines"),
    ({"type": "integer", "multipleOf": 1025}, "1026", "xgrammar outlines"),
    ({"type": "integer", "multipleOf": 2.5}, "3", "xgrammar outlines"),
    ({"type": "number", "multipleOf": 0.1}, "0.35", "xgrammar outlines"),
    ({"type": "number", "multipleOf": 3}, "1e1", "xgrammar"),
    ({"type": "number", "multipleOf": 3}, "4.5", "xgrammar outlines"),
    ({"type": "integer", "multipleOf": 3, "minimum": 2}, "1", "outlines"),
    ({"type": "integer", "multipleOf": 3, "minimum": 2, "maximum": 9}, "5", "outlines"),
    ({"type": "array", "prefixItems": [_I, {"type": "string"}]}, "[1,2]", ""),
    ({"type": "array", "prefixItems": [_I]}, '["x"]', ""),
    ({"type": "array", "prefixItems": [_I], "items": False}, "[1,2]", ""),
    ({"type": "array", "prefixItems": [_I], "items": _I}, '[1,"x"]', ""),
    ({"type": "array", "prefixItems": [_I, _I], "minItems": 1}, "[]", ""),
    ({"type": "array", "prefixItems": [_I, _I], "maxItems": 1}, "[1,2]", "outlines"),
    ({"type": "array", "items": False}, "[1]", ""),
    ({"type": "array", "items": _I, "minItems": 2}, "[1]", ""),
    ({"type": "array", "minItems": 2}, "[1]", ""),
    ({"type": "array", "maxItems": 1}, "[1,2]", ""),
    ({"enum": [{"a": 1}]}, '{"a":2}', ""),
    ({"enum": [1.5]}, "1.6", ""),
    ({"enum": [[1, "a"]]}, '[1,"b"]', ""),
    ({"enum": ["a", 1, None]}, "2", ""),
    ({"enum": [{}]}, '{"a":1}', ""),
    ({"enum": [{'"': 1}]}, '{""":1}', "outlines"),
    ({"enum": [[{"é.*": 2}]]}, '[{"éxx":2}]', "outlines"),
    ({"enum": [{"a": "b.c"}]}, '{"a":"bxc"}', ""),
    ({"type": ["string", "null"], "minLength": 2}, '"a"', ""),
    ({"type": ["integer", "string"], "minimum": 2, "minLength": 2}, "1", "outlines"),
    ({"minLength": 2}, '"a"', "xgrammar"),
    ({"minimum": 2}, "1", "xgrammar"),
    ({"properties": {"a": _I}}, '{"a":"x"}', ""),
    ({"items": _I}, '["x"]', ""),
    ({"required": ["a"]}, "{}", "xgrammar"),
    ({"prefixItems": [_I]}, '["x"]', ""),
    (
        {
            "anyOf": [
                {"type": "object", "properties": {"a": _I}, "required": ["a"]},
                {"type": "object", "properties": {"b": _I}, "required": ["b"]},
            ]
        },
        '{"a":"x"}',
        "",
    ),
    ({"type": "string", "anyOf": [{"minLength": 3}, {"maxLength": 1}]}, '"ab"', "xgrammar"),
    (
        {
            "type": "object",
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            "properties": {"a": _I, "b": _I},
        },
        "{}",
        "xgrammar outlines",
    ),
    ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}, '"a"', "xgrammar"),
    (
        {
            "$defs": {"n": {"type": "object", "properties": {"x": _I, "n": {"$ref": "#/$defs/n"}}}},
            "$ref": "#/$defs/n",
        },
        '{"n":{"x":"y"}}',
        "",
    ),
    ({"type": "object", "properties": {"n": {"$ref": "#"}, "x": _I}}, '{"n":{"x":"y"}}', ""),
    ({"type": "array", "uniqueItems": True}, "[1,1]", "xgrammar outlines"),
    ({"type": "array", "contains": _I}, "[]", "xgrammar outlines"),
    ({"not": {"type": "string"}}, '"a"', "xgrammar"),
    (
        {"type": "object", "unevaluatedProperties": False, "properties": {"a": _I}},
        '{"b":1}',
        "xgrammar",
    ),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1}', "xgrammar outlines"),
    ({"type": "string", "format": "date"}, '"x"', ""),
    ({"type": "string", "format": "uri-reference"}, '"\\\\"', "llguidance outlines"),
    ({"type": "string", "format": "regex"}, '"("', "xgrammar outlines"),
    ({"type": "string", "format": "json-pointer"}, '"x"', "outlines"),
    ({"type": "string", "format": "email"}, '"x"', ""),
    ({"type": "string", "format": "date-time"}, '"x"', ""),
    ({"type": "string", "format": "time"}, '"x"', ""),
    ({"type": "string", "format": "duration"}, '"x"', "outlines"),
    ({"type": "string", "format": "hostname"}, '"-"', "outlines"),
    ({"type": "string", "format": "ipv4"}, '"x"', "outlines"),
    ({"type": "string", "format": "ipv6"}, '"x"', "outlines"),
    ({"type": "string", "format": "uuid"}, '"x"', ""),
    ({"type": "string", "format": "uri"}, '"x"', ""),
    (
        {"type": "string", "format": "hostname", "allOf": [{"format": "ipv4"}]},
        '"a.b"',
        "xgrammar outlines",
    ),
    ({"type": "string", "format": "uri-template"}, '"{"', "llguidance outlines"),
    ({"type": "string", "format": "relative-json-pointer"}, '"x"', "outlines"),
]
_NO_JSON: list[tuple[Any, str]] = [
    *(({"type": "string", **schema}, f'"{char}"')
      for schema in ({}, {"minLength": 1}, {"maxLength": 1}, {"pattern": "^[^x]$"},
                     {"pattern": "^[\\s\"]$"}, {"pattern": "^\\\\$"}, {"format": "iri"})
      for char in "\0\t\n\x1f\"\\"),
    *(({"type": "object", "propertyNames": names}, f'{{"{char}":1}}')
      for names in ({"minLength": 1}, {"maxLength": 1}, {"pattern": "^[^x]$"})
      for char in "\t\n\"\\"),
    *(({"type": "object", "patternProperties": {"^\\S$": True}}, f'{{"{char}":1}}')
      for char in "\t\"\\"),
]  # fmt: skip
_DISGUISED = "\\u0061"
"""A declared key spelled with an escape, where additional keys are free: not named."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("schema", "text", "takers"), _FORBIDDEN, ids=range(len(_FORBIDDEN)))
def test_a_forbidden_text(schema: Any, text: str, takers: str, backend: str) -> None:
    takes = _takes(schema, text, backend)
    assert takes == (backend in takers.split())
    rewritten = Rewritten(schema, {"": ""})
    if takes and not (_DISGUISED in text and "{" in text):
        assert unenforced(rewritten, backend) or unenforced_formats(rewritten, backend)


@pytest.mark.parametrize(
    ("name", "text", "takers"),
    [
        ("date", "2023-02-29", _ALL),
        ("date", "2024-02-30", "xgrammar outlines"),
        ("date-time", "2024-02-30T00:00:00Z", "xgrammar outlines"),
        ("date-time", "2024-02-01T00:00:00", "outlines"),
        ("time", "12:00:00", "outlines"),
        ("ipv4", "01.2.3.4", "xgrammar"),
        ("hostname", "a" * 64, "xgrammar"),
    ],
)
def test_what_a_format_is_enforced_as(name: str, text: str, takers: str) -> None:
    """Not named: docs/grammars.md tells of these."""
    schema = {"type": "string", "format": name}
    found = [backend for backend in BACKENDS if _takes(schema, f'"{text}"', backend)]
    known = {one for one in BACKENDS if not unenforced_formats(Rewritten(schema, {"": ""}), one)}
    assert {*found} & known == {*takers.split()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("schema", "text"), _NO_JSON, ids=range(len(_NO_JSON)))
def test_what_is_no_json(schema: Any, text: str, backend: str) -> None:
    assert not _takes(schema, text, backend)


def _takes(schema: Any, text: str, backend: str) -> bool:
    for form in forms(schema, backend):
        try:
            return Texts(form, backend).accepts(text)
        except Refused:
            continue
    return False


_ALLOWED: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": _I, "b": _I}}, '{"b":1,"a":2}'),
    ({"type": "object", "properties": {"a": _I, "b": _I}, "required": ["b"]}, '{"b":1,"a":2}'),
    ({"type": "object", "properties": {"a": _I, "b": _I}, "required": ["b"]}, '{"a":1,"b":2}'),
    ({"type": "object", "properties": {"a": _I}, "required": ["a"]}, '{"a":1,"x":[],"y":{}}'),
    ({"type": "object", "properties": {"a": _I, "ab": _I}}, '{"abc":null,"":0,"ab":1,"a":2}'),
    ({"type": "object", "properties": {"a": _I, "b": _I}, "maxProperties": 1}, '{"b":1}'),
    (
        {
            "anyOf": [{"type": "string"}, {"type": "object"}],
            "properties": {"a": _I},
            "additionalProperties": True,
        },
        '{"b":true}',
    ),
    ({"type": "object", "properties": {"a": False}, "patternProperties": {"^x": _I}}, '{"b":""}'),
    ({"type": "object", "properties": {"a": _I}}, '{"\\u000f":1}'),
    ({"type": "string", "format": "regex"}, '"^(a|b)[a-z]{2,3}$"'),
    ({"type": "string", "format": "json-pointer"}, '"/a/~0b"'),
    ({"type": "string", "format": "anything"}, '"x"'),
]


@pytest.mark.parametrize(("schema", "text"), _ALLOWED, ids=range(len(_ALLOWED)))
def test_llguidance_takes_what_its_form_is_for(schema: Any, text: str) -> None:
    assert _takes(schema, text, "llguidance")


@pytest.mark.parametrize("order", ['{"b":1,"a":2}', '{"a":2,"b":1}'])
def test_a_fixed_order_of_keys(order: str) -> None:
    schema = {"type": "object", "properties": {"a": _I, "b": _I}, "additionalProperties": False}
    (form, *_) = forms(schema, "llguidance", fixed_order=True)
    assert Texts(form, "llguidance").accepts(order) == order.startswith('{"a"')


@pytest.mark.parametrize(("spaces", "allowed"), [(0, True), (8, True), (9, False)])
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_white_space_is_bounded_alike(backend: str, spaces: int, allowed: bool) -> None:
    schema = {"type": "object", "properties": {"a": _I}, "required": ["a"]}
    (form, *_) = forms(schema, backend)
    assert Texts(form, backend).accepts('{"a":' + " " * spaces + "1}") == allowed
