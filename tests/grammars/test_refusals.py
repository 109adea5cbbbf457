"""What is refused before, or instead of, a grammar that would be of no use, and in which words."""

from typing import Any

import pytest

from engine_client import GrammarClient, GrammarSpec
from tests.cases.test_schemas import BYTES
from tests.grammars.test_plan import SPACED, refusal_of


@pytest.mark.parametrize("separator", ['"', "}", ".,*", ",,", "x,", ", x"])
def test_a_separator_is_one(client: GrammarClient, separator: str) -> None:
    spec = GrammarSpec.json_schema({}, max_whitespace=0, item_separator=separator)
    assert "isn't JSON" in refusal_of(client, spec).message
    spec = GrammarSpec.json_schema({}, max_whitespace=0, key_separator=separator.replace(",", ":"))
    assert "isn't JSON" in refusal_of(client, spec).message


@pytest.mark.parametrize(
    "spec",
    [GrammarSpec.ebnf("root ::= root"), GrammarSpec.lark("start: start")],
)
def test_a_grammar_that_begins_nowhere_is_refused(client: GrammarClient, spec: GrammarSpec) -> None:
    refused = refusal_of(client, spec)
    assert (refused.reason, "leads to itself" in refused.message) == ("SPEC_INVALID", True)


def test_long_choices_go_to_the_backend_that_is_soonest_ready(client: GrammarClient) -> None:
    assert client.compile(GrammarSpec.choice(["yes", "no"]), BYTES).backend == "xgrammar"
    many = [f"number {number}" for number in range(1000)]
    assert client.compile(GrammarSpec.choice(many), BYTES).backend == "llguidance"
    assert client.compile(GrammarSpec.choice(["x" * 5000]), BYTES).backend == "llguidance"
    too_many = GrammarSpec.choice([str(number) for number in range(50_001)])
    assert refusal_of(client, too_many).reason == "SPEC_TOO_LARGE"


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"type": "integer", "minimum": 1.5, "maximum": 1.7},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
        {"type": "string", "minLength": 3, "maxLength": 1},
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
    ],
)
def test_what_no_value_fits_is_no_spec(client: GrammarClient, schema: Any) -> None:
    refused = refusal_of(client, GrammarSpec.json_schema(schema))
    assert refused.reason == "SPEC_INVALID"
    assert "no value fits" in str(refused)


def test_a_refusal_names_what_the_schema_has(client: GrammarClient) -> None:
    big = {"type": "array", "items": {"type": "integer", "minimum": 10**400}}
    for backend in ("llguidance", "xgrammar"):
        refused = refusal_of(client, GrammarSpec.json_schema(big, backend=backend))
        assert refused.reason == "SPEC_UNENFORCED"
        assert not str(refused).rstrip().endswith(":")
        ((pointer, keyword),) = refused.unenforced
        assert keyword in (big if pointer == "" else big["items"])
    refused = refusal_of(client, GrammarSpec.json_schema({}, backend="outlines"))
    assert (refused.reason, refused.unenforced) == ("SPEC_UNSUPPORTED", ())
    refused = refusal_of(client, GrammarSpec.json_schema('{"minimum": 1e400}'))
    assert "1e400" in str(refused)


def test_a_backend_without_such_separators_says_so(client: GrammarClient) -> None:
    for backend in ("xgrammar", "outlines"):
        spec = GrammarSpec.json_schema(
            SPACED, item_separator=",\n", max_whitespace=0, backend=backend
        )
        refused = refusal_of(client, spec)
        assert refused.reason == "SPEC_UNSUPPORTED"
        assert backend in refused.message


def test_a_grammar_may_begin_with_a_stop_token(client: GrammarClient) -> None:
    assert client.compile(GrammarSpec.ebnf('root ::= Token(256) "b"'), BYTES).backend == "xgrammar"
