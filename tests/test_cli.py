"""The command line, as its users meet it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_client import GrammarClient
from tests.support import ServiceProcess, deepseek_path, toy


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grammar_service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_health_of_a_service_and_of_none(service: ServiceProcess, tmp_path: Path) -> None:
    assert run("health", service.target).stdout == "SERVING\n"
    gone = run("health", f"unix:{tmp_path}/none.sock", "--timeout", "0.3")
    assert gone.returncode == 1
    assert "DEADLINE_EXCEEDED" in gone.stderr


def test_a_tokenizer_shows_what_it_would_be_and_that_its_bytes_are_right() -> None:
    shown = json.loads(run("tokenizer", str(deepseek_path())).stdout)
    assert shown["width"] == 129_280
    assert shown["round_trip"] == "ok"
    assert list(shown["stop_tokens"]) == ["1"]


def test_a_service_shows_what_is_registered(client: GrammarClient, service: ServiceProcess) -> None:
    vocabulary = toy(["only", "this", "<eos>"], stop=[2], width=9)
    client.register_tokenizer(vocabulary)
    lines = run("tokenizer", "--target", service.target).stdout.splitlines()
    found = {line["id"]: line for line in map(json.loads, lines)}
    assert found[vocabulary.id]["width"] == 9
    assert found[vocabulary.id]["stop_token_ids"] == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml doesn't exist"),
        (["serve", "--max-rows", "x"], "max_rows"),
        (["serve", "--listen", "0.0.0.0:0"], "beyond loopback"),
        (["serve", "--listen", "unix:/nowhere/x.sock"], "/nowhere"),
        (["serve", "--region-dir", "/nowhere/x"], "/nowhere/x"),
        (["serve", "--tokenizers", "/nowhere"], "/nowhere"),
        (["tokenizer"], "PATH"),
        (["tokenizer", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: list[str], message: str) -> None:
    mistaken = run(*arguments)
    assert mistaken.returncode != 0
    assert message in mistaken.stderr
    assert "Traceback" not in mistaken.stderr
