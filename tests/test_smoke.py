"""The shortest way through everything: compile, step to the end, close."""

import subprocess
import sys

import pytest

from engine_client import GrammarSpec, Outcome, Row
from tests.support import ServiceProcess, allowed, toy

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
VOCABULARY = toy(["{", "}", '"a"', ":", "1", " ", "x", "<eos>"], stop=[7])


@pytest.mark.parametrize("shared", [True, False])
def test_a_sequence_from_start_to_end(service: ServiceProcess, shared: bool) -> None:
    with service.client(shared=shared) as client:
        grammar = client.compile(GrammarSpec.json_schema(SCHEMA, max_whitespace=0), VOCABULARY)
        history: list[int] = []
        seen = []
        for token in [0, 2, 3, 4, 1, 7, None]:
            result = client.step([Row(f"smoke-{shared}", grammar, history)])
            seen.append((result.outcomes[0], allowed(result.mask(0))))
            if token is not None:
                history.append(token)
        assert seen == [
            (Outcome.OK, [0]),
            (Outcome.OK, [2]),
            (Outcome.OK, [3]),
            (Outcome.OK, [4]),
            (Outcome.OK, [1, 4]),
            (Outcome.COMPLETE, [7]),
            (Outcome.TERMINATED, [7]),
        ]
        client.close_sequences([f"smoke-{shared}"])


def test_importing_the_client_takes_nothing_heavy() -> None:
    program = (
        "import sys, engine_client;"
        "print([m for m in ('torch', 'xgrammar', 'transformers', 'grammar_service')"
        " if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "[]", run.stderr
