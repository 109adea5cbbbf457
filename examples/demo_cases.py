"""The demo's grammars, and for each a validator that isn't ours.

Random weights like everything alike, white space and long strings too, so every text that these
grammars allow is short.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from engine_client import GrammarSpec


@dataclass(frozen=True)
class Case:
    """A prompt, its grammar, and who judges the output."""

    prompt: str
    spec: GrammarSpec
    judge: str
    accepts: Callable[[str], bool]

    @property
    def grammar(self) -> str:
        """The grammar, to be shown."""
        return self.spec.source or " | ".join(self.spec.choices)


def cases() -> list[Case]:
    """Eight prompts under six kinds of grammar."""
    return [
        _schema("A person:", _PERSON),
        _schema("An order:", _ORDER),
        _schema("A shape:", _SHAPE),
        _regex("A date:", "20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"),
        _regex("A network card:", "([0-9a-f]{2}:){5}[0-9a-f]{2}"),
        Case("A verdict:", GrammarSpec.choice(_VERDICTS), "in the list", _VERDICTS.__contains__),
        Case("A sum:", GrammarSpec.ebnf(_SUM), "Python's ast", _is_sum),
        Case(
            "What is the weather?",
            GrammarSpec.structural_tag(_CALL, max_whitespace=1),
            "re, jsonschema",
            _is_call,
        ),
    ]


_NAME = {"type": "string", "pattern": "^[A-Z][a-z]{2,7}$"}
_PERSON = {
    "type": "object",
    "properties": {
        "name": _NAME,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "motto": {"type": "string", "maxLength": 12},
        "admin": {"type": "boolean"},
    },
    "required": ["name", "age", "motto", "admin"],
    "additionalProperties": False,
}
_ORDER = {
    "$defs": {
        "item": {
            "type": "object",
            "properties": {
                "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
                "count": {"type": "integer", "minimum": 1, "maximum": 99},
            },
            "required": ["sku", "count"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 2, "maxItems": 3},
        "paid": {"type": ["boolean", "null"]},
    },
    "required": ["items", "paid"],
    "additionalProperties": False,
}
_SHAPE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, side: {"enum": [1, 2, 4, 8]}},
            "required": ["kind", side],
            "additionalProperties": False,
        }
        for kind, side in (("circle", "radius"), ("square", "width"))
    ]
}
_VERDICTS = ["approved", "declined", "needs a second look"]
_SUM = """root ::= number (sign number){2,4}
sign ::= " + " | " - "
number ::= [1-9] [0-9]{0,2}
"""
_PLACE = {
    "type": "object",
    "properties": {"city": _NAME, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_CALL = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "I look it up. "},
            {
                "type": "tag",
                "begin": "<call=weather>",
                "content": {"type": "json_schema", "json_schema": _PLACE},
                "end": "</call>",
            },
        ],
    },
}


def _schema(prompt: str, schema: dict[str, Any]) -> Case:
    spec = GrammarSpec.json_schema(schema, max_whitespace=1)
    return Case(prompt, spec, "jsonschema", lambda text: _fits(text, schema))


def _regex(prompt: str, pattern: str) -> Case:
    spec = GrammarSpec.regex(pattern)
    return Case(prompt, spec, "re", lambda text: re.fullmatch(pattern, text) is not None)


def _fits(text: str, schema: dict[str, Any]) -> bool:
    try:
        instance = json.loads(text)
    except ValueError:
        return False
    return bool(jsonschema.Draft202012Validator(schema).is_valid(instance))


def _is_sum(text: str) -> bool:
    """Three to five numbers, added and subtracted."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except SyntaxError:
        return False
    known = (ast.Expression, ast.BinOp, ast.Constant, ast.Add, ast.Sub)
    numbers = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return (
        all(isinstance(node, known) for node in nodes)
        and 3 <= len(numbers) <= 5
        and all(isinstance(number, int) and 1 <= number <= 999 for number in numbers)
    )


def _is_call(text: str) -> bool:
    match = re.fullmatch(r"I look it up\. <call=weather>(.*)</call>", text, re.DOTALL)
    return match is not None and _fits(match[1], _PLACE)
