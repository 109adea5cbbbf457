"""A service that allows some grammar libraries only: a request may not choose one that hurts."""

from collections.abc import Iterator

import pytest

from engine_client import GrammarClient, GrammarSpec, Refused
from grammar_service.settings import ServiceSettings
from tests.server import TOKENS
from tests.support import ServiceProcess, running_service

LIST = GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}})


@pytest.fixture(scope="module")
def fewer() -> Iterator[ServiceProcess]:
    flags = ["--backends=outlines", "--backends=xgrammar", "--compile-workers=1"]
    with running_service(*flags) as service:
        yield service


@pytest.fixture
def restricted(fewer: ServiceProcess) -> Iterator[GrammarClient]:
    with fewer.client() as client:
        yield client


def test_auto_picks_among_those_that_are_allowed(
    restricted: GrammarClient, client: GrammarClient
) -> None:
    here, there = restricted.compile(LIST, TOKENS), client.compile(LIST, TOKENS)
    assert (here.backend, there.backend) == ("xgrammar", "llguidance")
    # What is compiled differently isn't named alike, and what is the same is.
    assert here.id != there.id
    asked = GrammarSpec(LIST.type, LIST.source, backend="xgrammar")
    assert restricted.compile(asked, TOKENS).id == client.compile(asked, TOKENS).id


def test_a_backend_that_is_not_allowed_is_refused(restricted: GrammarClient) -> None:
    for spec in (
        GrammarSpec(LIST.type, LIST.source, backend="llguidance"),
        GrammarSpec.choice(["x"], backend="llguidance"),
    ):
        with pytest.raises(Refused, match="llguidance isn't allowed") as caught:
            restricted.compile(spec, TOKENS)
        assert caught.value.reason == "SPEC_UNSUPPORTED"
        assert "xgrammar, outlines" in caught.value.message
    # Nobody else speaks its language.
    with pytest.raises(Refused, match="llguidance") as caught:
        restricted.compile(GrammarSpec.lark('start: "x"'), TOKENS)
    assert caught.value.reason == "SPEC_UNSUPPORTED"
    assert "allows" in caught.value.message


def test_what_they_do_not_enforce_is_refused(restricted: GrammarClient) -> None:
    spec = GrammarSpec.json_schema({"type": "integer", "multipleOf": 3, "maximum": 9})
    with pytest.raises(Refused) as caught:
        restricted.compile(spec, TOKENS)
    assert caught.value.reason == "SPEC_UNENFORCED"


@pytest.mark.parametrize("backends", [[], ["other"], ["xgrammar", "other"]])
def test_settings_name_backends_that_exist(backends: list[str]) -> None:
    with pytest.raises(ValueError, match="backends"):
        ServiceSettings(backends=backends)
