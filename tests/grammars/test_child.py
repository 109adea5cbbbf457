"""An error that nobody foresaw, in a child: its caller hears of it, and the child lives on."""

import json
from typing import Any

import pytest

from engine_client import GrammarSpec
from grammar_service.errors import Internal
from grammar_service.grammars import child, children
from grammar_service.grammars.children import CompileChildren
from grammar_service.grammars.schema import Limits
from tests.cases.test_schemas import BYTES


class _Broken:
    def compile(self, spec: GrammarSpec, vocabulary: object) -> bytes:
        raise KeyError(spec.source)


class _Child:
    """A child process that answers each compile with one header."""

    alive, base = True, 0

    def __init__(self, header: dict[str, Any]) -> None:
        self._header = header
        self.known = {BYTES.id}
        self.compiles = 0

    def wait_ready(self, closed: object) -> None:
        pass

    def memory(self) -> int:
        return 0

    def died(self) -> bool:
        return False

    def poll(self, seconds: float) -> bool:
        return True

    def send(self, job: tuple[object, ...]) -> None:
        self.compiles += 1

    def receive(self) -> bytes:
        return json.dumps(self._header).encode()

    def kill(self, why: str) -> int:
        self.alive = False
        return 0


def _answer() -> dict[str, Any]:
    backends: Any = {"llguidance": _Broken()}
    spec = GrammarSpec.json_schema({"type": "integer"})
    header, data = child._compile(spec, BYTES, backends, Limits(), 1.0)
    assert data is None
    return header


def test_a_child_answers_with_the_name_of_an_error() -> None:
    header = _answer()
    assert header["failed"] == "KeyError"
    assert "in compile" in header["trace"]
    assert "integer" not in json.dumps(header)


def test_the_caller_hears_of_it_and_the_child_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    only = _Child(_answer())
    monkeypatch.setattr(children, "start", lambda backends, seconds: only)
    pool = CompileChildren(1, ["llguidance"], 10, 10, 1 << 30, 1 << 30, 8, Limits())
    try:
        for _ in range(2):
            with pytest.raises(Internal, match="KeyError") as failed:
                pool.submit(GrammarSpec.regex("a"), BYTES).result(10)
            assert failed.value.reason == "COMPILE_CRASHED"
            assert only.alive
        assert only.compiles == 2
    finally:
        pool._closed.set()
        pool._jobs.close()
