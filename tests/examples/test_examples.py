"""The examples as a newcomer runs them: as programs."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from examples.demo_cases import cases
from tests.support import ServiceProcess

ROOT = Path(__file__).parents[2]


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]", seconds: float) -> tuple[int, str, str]:
    """Its exit status, output and errors; it doesn't outlive the test."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate(timeout=20)
        pytest.fail(f"it takes too long: {output}{errors}")
    return process.returncode, output, errors


@pytest.mark.parametrize("by_argument", [True, False])
def test_engine_loop(service: ServiceProcess, by_argument: bool) -> None:
    if by_argument:
        process = start("examples.engine_loop", service.target)
    else:
        process = start("examples.engine_loop", GRAMMAR_SERVICE_TARGET=service.target)
    status, output, errors = finish(process, 60)
    assert (status, errors) == (0, "")
    texts = [line.split(maxsplit=1) for line in output.splitlines()]
    assert [kind for kind, _ in texts] == ["json_schema"] * 2 + ["regex"] * 2 + ["choice"] * 2
    for _, text in texts[:2]:
        value = json.loads(text)
        assert value.keys() == {"id", "paid"}
        assert len(value["id"]) <= 6
    assert all(re.fullmatch("[A-Z]{2}-[0-9]{4}", text) for _, text in texts[2:4])
    assert {text for _, text in texts[4:]} <= {"approved", "declined"}


def test_demo(tmp_path: Path) -> None:
    status, output, errors = finish(start("examples.demo", TMPDIR=str(tmp_path)), 110)
    assert status == 0, output + errors
    assert "8 of 8 outputs are complete and valid" in output
    assert "is killed with SIGKILL" in output
    left_behind(output, tmp_path)


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGTERM, "the service listens"), (signal.SIGINT, "is killed with SIGKILL")],
)
def test_demo_that_is_interrupted(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    process = start("examples.demo", TMPDIR=str(tmp_path))
    assert process.stdout is not None
    output = ""
    while moment not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    services = psutil.Process(process.pid).children()
    process.send_signal(number)
    status, _, errors = finish(process, 30)
    assert status == 128 + number
    assert "Traceback" not in errors
    assert not any(service.is_running() for service in services)
    left_behind(output, tmp_path)


def left_behind(output: str, directory: Path) -> None:
    """Fails if the demo left a directory behind."""
    assert list(directory.glob("grammar-demo-*")) == []
    region_dir = re.search(r"masks in (\S+)", output)
    assert region_dir is not None
    assert not Path(region_dir[1]).exists()


@pytest.mark.parametrize(
    ("index", "right", "wrong"),
    [
        (0, '{"name":"Ada","age":36,"motto":"","admin":true}', '{"name":"ada"}'),
        (3, "2024-12-28", "2024-13-01"),
        (5, "approved", "approve"),
        (6, "1 + 2 - 30", "1 + 2"),
        (6, "100 - 2 - 3 - 4 + 5", "1 * 2 + 3"),
        (7, 'I look it up. <call=weather>{"city":"Rome", "days":2}</call>', "I look it up. "),
    ],
)
def test_the_demos_validators(index: int, right: str, wrong: str) -> None:
    case = cases()[index]
    assert case.accepts(right)
    assert not case.accepts(wrong)
