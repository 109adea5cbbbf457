"""Grammars by id: compiled by one client, stepped by another that has no tokenizer."""

from collections.abc import Callable

import pytest

from engine_client import GrammarClient, GrammarSpec, Outcome, Policy, Refused, Row
from tests.support import allowed, running_service, toy

VOCABULARY = toy(["a", "b", "c", "<eos>"], stop=[3], width=40)


def test_a_grammar_is_stepped_by_its_id(client: GrammarClient, new_id: Callable[[], str]) -> None:
    compiled = client.compile(GrammarSpec.regex("ab|ac"), VOCABULARY)
    found = client.get_grammar(compiled.id)
    assert (found.id, found.words, found.token_limit) == (compiled.id, 2, 4)
    assert found.vocabulary is None
    row = Row(new_id(), found, [0])
    result = client.step([row])
    assert result.outcomes == [Outcome.OK]
    assert allowed(result.mask(0)) == [1, 2]
    assert row.all_stop_tokens() == [3]


def test_an_id_that_nobody_compiled_is_refused(client: GrammarClient) -> None:
    with pytest.raises(Refused, match="UNKNOWN_GRAMMAR"):
        client.get_grammar("gra-" + "0" * 32)


def test_a_grammar_by_id_is_compiled_again_when_only_it_is_lost() -> None:
    # Room for the newest grammar alone: the first one goes when the second comes.
    with running_service("--grammar-cache-bytes", "1") as service, service.client() as client:
        compiled = client.compile(GrammarSpec.regex("ab|ac"), VOCABULARY)
        found = client.get_grammar(compiled.id)
        client.compile(GrammarSpec.regex("bb"), VOCABULARY)
        with pytest.raises(Refused, match="UNKNOWN_GRAMMAR"):
            client.get_grammar(compiled.id)
        result = client.step([Row("one", found, [0])])
        assert result.outcomes == [Outcome.OK]
        assert allowed(result.mask(0)) == [1, 2]
        assert client.stats.snapshot()["healed_unknown_grammar"] == 1


def test_without_its_tokenizer_a_row_fails_with_the_reason() -> None:
    with running_service() as service, service.client(policy=Policy.IN_PROCESS) as client:
        compiled = client.compile(GrammarSpec.regex("ab|ac"), VOCABULARY)
        found = client.get_grammar(compiled.id)
        service.kill()
        service.start()
        result = client.step([Row("one", found, [0])])
        assert result.outcomes == [Outcome.FAILED]
        assert result.notes[0].reason == "UNKNOWN_TOKENIZER"
        assert allowed(result.mask(0)) == [3]
