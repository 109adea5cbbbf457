"""What a backend can't have is refused by name, and nothing else is."""

from engine_client import GrammarClient, GrammarSpec
from tests.cases.test_schemas import BYTES
from tests.grammars.test_plan import SPACED, refusal_of


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
