"""What is done around the libraries' own faults; with them called plainly, these fail."""

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


def test_an_object_of_many_optional_properties(client: GrammarClient) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(600)}
    schema = {"type": "object", "properties": properties}
    tokens = toy(["{", '"', "p", "4", "0", ":", "}", "x", "<eos>"], stop=[8])
    grammar = client.compile(GrammarSpec.json_schema(schema, max_whitespace=0), tokens)
    assert grammar.backend == "llguidance"
    history = [0, 1, 2, 3, 4, 1, 5, 1, 7, 1, 6]
    result = client.step([Row("many-properties", grammar, history)])
    assert result.outcomes == [Outcome.COMPLETE], result.notes
    assert allowed(result.mask(0)) == [8]


def test_what_is_past_a_limit_of_llguidance_is_no_dead_end(client: GrammarClient) -> None:
    # As many items for each byte of a token.
    numbers = range(9000)
    rules = [f'r{number}: "a" "b" "c" "d" "e" "f" "{number}"' for number in numbers]
    start = " | ".join(f"r{number}" for number in numbers)
    lark = "\n".join([f"start: {start}", *rules])
    tokens = toy(["a", "abcdef", "b", "<eos>"], stop=[3])
    wide = client.compile(GrammarSpec.lark(lark), tokens)
    narrow = client.compile(GrammarSpec.choice(["ab"], backend="llguidance"), tokens)
    result = client.step([Row("past-a-limit", wide, []), Row("beside-it", narrow, [])])
    assert result.outcomes == [Outcome.FAILED, Outcome.OK]
    assert result.notes[0].reason == "BACKEND_ERROR"
    assert "limit" in result.notes[0].message
    assert [allowed(mask) for mask in result.masks] == [[3], [0]]
