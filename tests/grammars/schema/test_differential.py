"""Whatever a library that is said to enforce a schema takes, the schema accepts."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from grammar_service.errors import Invalid
from grammar_service.grammars.schema import candidates, check, rewrite
from tests.grammars.schema.strategies import schemas, values
from tests.grammars.schema.texts import Refused, Texts

_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.mark.parametrize(
    ("backend", "examples"), [("llguidance", 300), ("xgrammar", 25), ("outlines", 15)]
)
def test_what_is_taken_is_valid(backend: str, examples: int) -> None:
    @given(schema=schemas(), instances=st.lists(values, min_size=5, max_size=12))
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=_SLOW)
    def run(schema: Any, instances: list[Any]) -> None:
        try:
            dialect = check(schema)
        except Invalid:
            assume(False)
        (candidate,) = candidates(rewrite(schema, dialect), [backend])
        assume(not candidate.unenforced)
        validator = jsonschema.Draft202012Validator(schema)
        invalid = [value for value in instances if not validator.is_valid(value)]
        assume(invalid)
        texts = _first(candidate.schemas, backend)
        for value in invalid:
            assert not texts.accepts(json.dumps(value)), (value, candidate.schemas[0])

    run()


def _first(forms: tuple[Any, ...], backend: str) -> Texts:
    for schema in forms:
        try:
            return Texts(schema, backend)
        except Refused:
            continue
    assume(False)
    raise AssertionError
