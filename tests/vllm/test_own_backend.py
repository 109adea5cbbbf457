"""The same requests with vLLM's own backend and with the service: what comes out is as valid."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support import ServiceProcess
from tests.vllm.own_backend import REQUESTS, SEEDS
from tests.vllm.support import environment


def fits(wanted: dict[str, Any], text: str) -> bool:
    """Whether a text is what its request asked for."""
    if "json" in wanted:
        try:
            jsonschema.validate(json.loads(text), wanted["json"])
        except ValueError:
            return False
        return True
    if "regex" in wanted:
        return re.fullmatch(wanted["regex"], text) is not None
    if "choice" in wanted:
        return text in wanted["choice"]
    return re.fullmatch(r"(\(*)x(\)*)", text) is not None and text.count("(") == text.count(")")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("masked_by", ["vLLM", "the service"])
def test_every_completion_is_valid(model: Path, service: ServiceProcess, masked_by: str) -> None:
    with environment(service if masked_by == "the service" else None):
        before = service.counted("grammar_sequences_opened_total")
        command = [sys.executable, "-m", "tests.vllm.own_backend", str(model)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=dict(os.environ), timeout=200, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(REQUESTS) * SEEDS
    for index, text, finish_reason in found:
        assert finish_reason == "stop"
        assert fits(REQUESTS[index], text), text
    opened = service.counted("grammar_sequences_opened_total") - before
    assert opened == (len(found) if masked_by == "the service" else 0)
