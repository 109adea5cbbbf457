"""A server that speculates, with ngram drafts, and whose service gets hurt: it always goes on."""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from engine_client import GrammarSpec, Outcome, Row, Vocabulary
from examples.tiny_model import VOCABULARY
from tests.support import wait_until
from tests.vllm.server import (
    SCHEMA,
    Served,
    by_schema,
    constrained,
    frozen,
    gone,
    is_valid,
    letters,
    read,
    serving,
    text_of,
)

# Whichever test comes first waits for the server.
pytestmark = pytest.mark.timeout(420)

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
PROMPTS = ["hello", '{"name": "ada", "age": 36, "tags": ["a", "b"]}', "aaaa bbbb aaaa", "1 2 1 2"]
OBJECTS = {"type": "array", "items": {"type": "object"}, "minItems": 9}
ON = constrained(choice=["on"])
SLOW = constrained(grammar=f'root ::= "{"a" * 900_000}"')
"""Compiles for half a minute."""
STEP_TIMEOUT = 3


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    options = ["--speculative-config", json.dumps(NGRAM)]
    settings = {"step_timeout": str(STEP_TIMEOUT), "policy": "fail", "cool_down": "0"}
    with serving(model, ["--compile-seconds=8"], options, **settings) as served:
        yield served


def ask(server: Served, prompt: str = "hello", **parameters: Any) -> Any:
    """A completion at temperature 0: with others, vLLM's rejection sampler is wrong on a CPU."""
    return server.ask(prompt, **({"temperature": 0.0} | parameters))


def ask_until_served(server: Served, **parameters: Any) -> Any:
    """A completion, when it is there: on a busy machine a compile may need some tries."""
    answers: list[Any] = []

    def is_served() -> bool:
        with contextlib.suppress(openai.APIStatusError):
            answers.append(ask(server, **parameters))
        return bool(answers)

    wait_until(is_served, 120)
    return answers[0]


def stream_of(server: Served) -> Any:
    """A constrained stream in full swing."""
    ask_until_served(server, **(letters(900) | {"max_tokens": 1}))
    stream = ask(server, stream=True, **letters(900))
    assert read(stream, 5)
    return stream


@pytest.mark.parametrize(
    "wanted", [{"response_format": {"type": "json_object"}}, by_schema(OBJECTS)]
)
def test_json_that_used_to_end_in_an_index_error(
    server: Served, model: Path, wanted: dict[str, Any]
) -> None:
    vocabulary = Vocabulary.from_path(model, width=VOCABULARY)
    spec = GrammarSpec.json_schema({"type": ["object", "array"]})
    ask_until_served(server, max_tokens=1, **wanted)
    with server.service.client() as client:
        grammar = client.compile(spec, vocabulary)
        for number, prompt in enumerate(PROMPTS):
            [choice] = ask(server, prompt, max_tokens=60, return_token_ids=True, **wanted).choices
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content), dict | list)
            # Or it is the beginning of one.
            step = client.step([Row(f"judge-{number}", grammar, choice.token_ids)])
            assert step.outcomes[0] not in (Outcome.REJECTED, Outcome.FAILED), step.notes


def test_drafts_are_taken_and_the_text_is_valid(server: Served) -> None:
    ask_until_served(server, max_tokens=1, **by_schema(SCHEMA))
    before = server.service.counted('grammar_drafts_total{legal="yes"}')
    for prompt in PROMPTS:
        assert is_valid(text_of(ask(server, prompt, **by_schema(SCHEMA))))
    assert server.service.counted('grammar_drafts_total{legal="yes"}') > before

    def judge(prompt: str) -> bool:
        return is_valid(text_of(ask(server, prompt, **by_schema(SCHEMA))))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(judge, PROMPTS * 4))


def test_a_compile_without_end_ends_its_request_alone(server: Served) -> None:
    ask_until_served(server, **ON)
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(ask, server, **SLOW)
        while not hanging.done():  # its neighbours are served meanwhile
            assert server.serves()
            assert text_of(ask(server, **ON)) == "on"
        with pytest.raises(openai.InternalServerError):
            hanging.result()
    assert "COMPILE_DEADLINE" in server.log
    assert text_of(ask_until_served(server, **constrained(choice=["another"]))) == "another"


def test_a_service_gone_for_good(server: Served) -> None:
    stream = stream_of(server)
    with gone(server.service):
        with pytest.raises(openai.APIError):
            read(stream)
        assert "SERVICE_UNREACHABLE" in server.log  # the API says `error` alone
        assert server.serves()
    assert text_of(ask_until_served(server, **ON)) == "on"
    assert is_valid(text_of(ask_until_served(server, **by_schema(SCHEMA))))


def test_a_frozen_service(server: Served) -> None:
    ask_until_served(server, **ON)
    stream = stream_of(server)
    with ThreadPoolExecutor(1) as pool, frozen(server.service):
        began = time.monotonic()
        with pytest.raises(openai.APIError):
            read(stream)
        # The step waited to its deadline, and not much longer.
        assert time.monotonic() - began < STEP_TIMEOUT + 20
        assert server.serves()
        waiting = pool.submit(ask, server, **ON)
        assert server.serves()
    assert text_of(waiting.result()) == "on"
