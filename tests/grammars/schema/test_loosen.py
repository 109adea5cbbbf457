"""What llguidance is given where a caller takes what isn't enforced upon itself."""

import json
from functools import partial
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine_client import GrammarClient, GrammarSpec
from grammar_service.errors import Invalid
from grammar_service.grammars.schema import Rewritten, candidates, check, rewrite
from grammar_service.grammars.schema.enforcement import unenforced_keywords
from grammar_service.grammars.schema.loosen import loosened
from tests.cases.test_schemas import BYTES, accepts
from tests.grammars.schema.strategies import schemas, values
from tests.grammars.schema.texts import Refused, Texts

_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
_I = {"type": "integer"}


def rest_of(rewritten: Rewritten) -> Any:
    return loosened(rewritten.schema, partial(unenforced_keywords, backend="llguidance"))


@given(schema=schemas(), instances=st.lists(values, min_size=5, max_size=12))
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=_SLOW)
def test_what_is_left_is_no_narrower_and_what_is_named_is_all(
    schema: Any, instances: list[Any]
) -> None:
    try:
        rewritten = rewrite(schema, check(schema))
    except Invalid:
        assume(False)
    (candidate,) = candidates(rewritten, ["llguidance"])
    assume(candidate.unenforced)
    rest = jsonschema.Draft202012Validator(rest_of(rewritten))
    whole = jsonschema.Draft202012Validator(schema)
    for value in instances:
        assert rest.is_valid(value) or not whole.is_valid(value), value
    texts = []
    for form in candidate.schemas:
        try:
            texts.append(Texts(form, "llguidance"))
        except Refused:
            continue
        break
    for value in instances:
        if texts and texts[0].accepts(json.dumps(value)):
            assert rest.is_valid(value), "more than what is named isn't enforced"


# What is compiled with, what isn't enforced, and texts on either side.
@pytest.mark.parametrize(
    ("schema", "backend", "named", "taken", "rejected"),
    [
        pytest.param(
            {"items": _I, "uniqueItems": True, "maxItems": 3},
            *("llguidance", ["uniqueItems"]),
            *(["[1,1,1]", '"x"'], ["[1,1,1,1]", '["x"]']),
            id="the others lose maxItems without a type",
        ),
        pytest.param(
            {"type": "string", "pattern": "^(?=a)ab", "maxLength": 3},
            *("llguidance", ["pattern"], ['"ab"', '"xyz"'], ['"abcd"']),
            id="the others lose maxLength beside a pattern",
        ),
        pytest.param(
            {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "number", "maximum": 9}]},
            *("llguidance", ["oneOf"], ["-1.5", "5", "10"], ["10.5", '"x"']),
            id="a oneOf is taken as an anyOf",
        ),
        pytest.param(
            {
                "anyOf": [_I, {"type": "string"}],
                "oneOf": [{"multipleOf": 2}, {"multipleOf": 3}],
            },
            *("llguidance", ["oneOf"], ["2", "9", "6", '"ab"'], ["5", "0.5"]),
            id="and beside an anyOf as well",
        ),
        pytest.param(
            {
                "patternProperties": {"^a": _I, "b$": {"type": "string"}},
                "properties": {"c": {"uniqueItems": True}},
            },
            *("xgrammar", ["patternProperties", "properties", "uniqueItems"]),
            *(['{"c":[1,1]}'], ["{"]),
            id="who leaves least refuses it: the next",
        ),
    ],
)
def test_auto_takes_who_leaves_least(
    client: GrammarClient,
    schema: Any,
    backend: str,
    named: list[str],
    taken: list[str],
    rejected: list[str],
) -> None:
    grammar = client.compile(GrammarSpec.json_schema(schema, allow_unenforced=True), BYTES)
    assert grammar.backend == backend
    assert [keyword for _, keyword in grammar.unenforced] == named
    assert [text for text in taken + rejected if accepts(client, grammar, text)] == taken
