"""What is done around xgrammar's own faults; with the library called plainly, these fail."""

import pytest

from engine_client import GrammarClient, GrammarSpec, Outcome, Row
from tests.support import allowed, toy


@pytest.mark.parametrize(
    ("spec", "tokens", "history", "expected"),
    [
        (
            GrammarSpec.ebnf('root ::= "(" root ")" | "x" # a comment'),
            ["(", "((", ")", "))", "x", "<eos>"],
            [1, 1, 4],
            [2, 3],
        ),
        (
            GrammarSpec.json_schema(
                {
                    "type": "object",
                    "properties": {"c": {"$ref": "#"}, "d": {"$ref": "#/$defs/one"}},
                    "additionalProperties": False,
                    "$defs": {"one": {"const": 1}},
                },
                max_whitespace=0,
            ),
            ['{"c":', "{", "}", "}}", '"d":', "1", ",", "<eos>"],
            [0, 0, 1],
            [2, 3, 4],
        ),
    ],
    ids=["ebnf", "json_schema"],
)
def test_a_start_that_refers_to_itself_loses_no_token(
    client: GrammarClient,
    spec: GrammarSpec,
    tokens: list[str],
    history: list[int],
    expected: list[int],
) -> None:
    grammar = client.compile(spec, toy(tokens, stop=[len(tokens) - 1]))
    result = client.step([Row(f"self-{spec.type}", grammar, history)])
    assert result.outcomes == [Outcome.OK]
    assert allowed(result.mask(0)) == expected
