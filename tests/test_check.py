"""`grammar-service check` as a command: what it prints, and what it survives."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support import deepseek_path, wait_until

pytestmark = pytest.mark.timeout(300)

COMMAND = [sys.executable, "-m", "grammar_service", "check"]
SECONDS = 240

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
UNIQUE = {
    "type": "json_schema",
    "source": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
}
NUMBER = {"type": "regex", "pattern": "[0-9]+"}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<n>", "content": NUMBER, "end": "</n>"},
}
ENDLESS = {"type": "ebnf", "source": 'root ::= root root root | "a" | "b" | ""'}
ENDLESS_TEXT = "ab" * 2000
"""Each token takes time with the third power of those before it: hours for all, on any machine."""
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
"""The stop token of the real tokenizer."""

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "schema": ({"type": "json_schema", "source": OBJECT}, ['{"a":1}', '{"a":x}', '{"a":1', ""]),
    "schema as text": (
        {"type": "json_schema", "source": json.dumps(OBJECT)},
        ['{"a": 12}', '{"b": 12}'],
    ),
    "no white space": (
        {"type": "json_schema", "source": OBJECT, "options": {"max_whitespace": 0}},
        ['{"a":1}', '{"a": 1}'],
    ),
    "object": ({"type": "json_object"}, ['{"x":[null]}', "[]"]),
    "regex": ({"type": "regex", "source": "(abc)*n?"}, ["", "abcabc", "abn", "abcno"]),
    "choice": ({"type": "choice", "source": ["yes", "no"]}, ["yes", "no", "ye", "yesno"]),
    "ebnf": ({"type": "ebnf", "source": 'root ::= "a" root "b" | "é"'}, ["aaébb", "aaéb"]),
    "tag": ({"type": "structural_tag", "source": TAG}, ["<n>42</n>", "<n>x</n>"]),
    "nothing to check": ({"type": "regex", "source": "a"}, []),
    "half a pair": ({"type": "regex", "source": ".*"}, ["\ud800", "a"]),
    "end in the text": ({"type": "regex", "source": "a"}, ["a<eos>", "<eos>a"]),
}
ACCEPTED = {
    "schema": [True, False, False, False],
    "schema as text": [True, False],
    "no white space": [True, False],
    "object": [True, False],
    "regex": [True, True, False, False],
    "choice": [True, True, False, False],
    "ebnf": [True, False],
    "tag": [True, False],
    "nothing to check": [],
    "half a pair": [False, True],
    "end in the text": [True, False],
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "invalid": ({"type": "regex", "source": "("}, "SPEC_INVALID"),
    "no source": ({"type": "regex"}, "SPEC_INVALID"),
    "source of another type": ({"type": "choice", "source": "yes"}, "SPEC_INVALID"),
    "unknown type": ({"type": "poem", "source": "a"}, "SPEC_UNSUPPORTED"),
    "unknown key": ({"type": "regex", "source": "a", "option": {}}, "SPEC_INVALID"),
    "unknown option": ({"type": "regex", "source": "a", "options": {"x": 1}}, "SPEC_INVALID"),
    "option of another type": (
        {"type": "json_object", "options": {"max_whitespace": True}},
        "SPEC_INVALID",
    ),
    "number out of range": (
        {"type": "json_object", "options": {"max_whitespace": -1}},
        "SPEC_INVALID",
    ),
    "unknown backend": (
        {"type": "regex", "source": "a", "options": {"backend": "none"}},
        "SPEC_UNSUPPORTED",
    ),
    "half a pair as source": ({"type": "regex", "source": "\ud800"}, "SPEC_INVALID"),
    "unenforced": (UNIQUE, "SPEC_UNENFORCED"),
}
BAD_LINES = [
    b"no JSON",
    b"\xff",
    b"[]",
    b"{}",
    b'{"id": NaN, "spec": {}, "texts": []}',
    b'{"id": true, "spec": {}, "texts": []}',
    b'{"id": "no texts", "spec": {"type": "json_object"}}',
    b'{"id": "no spec", "texts": []}',
    b'{"id": "number", "spec": {"type": "json_object"}, "texts": [1]}',
    b"[" * 100_000,
]


def case(name: str | int, spec: dict[str, Any], texts: Sequence[str]) -> bytes:
    return json.dumps({"id": name, "spec": spec, "texts": texts, "remark": "is ignored"}).encode()


def save_tokenizer(path: Path, *, end: bool = True, space_first: bool = False) -> Path:
    """A byte-level tokenizer with a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("n", "o"), ("y", "e"), ("ye", "s")]
    pieces = [*letters, *(left + right for left, right in merges)]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=space_first, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    if end:
        tokenizer.add_special_tokens(["<eos>"])
    tokenizer.enable_truncation(max_length=3)
    tokenizer.save(str(path))
    return path


def write(path: Path, lines: Sequence[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines))
    return path


def run(
    tokenizer: Path, cases: Path | str, *flags: str, given: bytes = b""
) -> list[dict[str, Any]]:
    """The reports of a run that succeeds."""
    command = [*COMMAND, "--tokenizer", str(tokenizer), "--cases", str(cases), *flags]
    done = subprocess.run(command, input=given, capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def accepted(report: dict[str, Any]) -> list[bool]:
    return [result["accepted"] for result in report["results"]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small.json")


@pytest.fixture(scope="module")
def reports(tokenizer: Path) -> list[dict[str, Any]]:
    """The reports of one run over all that CASES, REFUSED and BAD_LINES have."""
    lines = [case(name, *parts) for name, parts in CASES.items()]
    lines += [case(name, spec, ["a"]) for name, (spec, _) in REFUSED.items()]
    lines += [case("opted in", UNIQUE | {"options": {"allow_unenforced": True}}, ["[1,1]"])]
    lines += [b"", *BAD_LINES, b"  "]
    return run(tokenizer, write(tokenizer.with_name("cases.jsonl"), lines))


@pytest.fixture(scope="module")
def by_id(reports: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {report["id"]: report for report in reports}


def test_there_is_a_report_for_each_case_in_order(reports: list[dict[str, Any]]) -> None:
    bad = [None, None, None, None, None, None, "no texts", "no spec", "number", None]
    assert [report["id"] for report in reports] == [*CASES, *REFUSED, "opted in", *bad]


@pytest.mark.parametrize("name", CASES)
def test_texts_are_accepted_or_not(by_id: dict[str, dict[str, Any]], name: str) -> None:
    report = by_id[name]
    assert report["refused"] is None
    assert report["compiled"]
    assert report["backend"] in ("xgrammar", "llguidance")
    assert report["compile_ms"] > 0
    assert report["unenforced"] == []
    assert accepted(report) == ACCEPTED[name]


@pytest.mark.parametrize(
    ("name", "text", "at", "why"),
    [
        ("schema", 0, None, None),
        ("schema", 1, 5, "token 5 ('x') isn't allowed; allowed are "),
        ("schema", 2, None, "all tokens are allowed, but the grammar can't end after the last; "),
        ("schema", 3, None, "all tokens are allowed, but the grammar can't end after the last; "),
        ("regex", 3, 1, "token 1 ('no') isn't allowed; allowed is 'a', 'n', 'ab', 'abc', '<eos>'"),
        ("choice", 2, None, "all tokens are allowed, but the grammar can't end after the last; "),
        ("choice", 3, 1, "token 1 ('no') isn't allowed; allowed is '<eos>'"),
        ("half a pair", 0, None, "the tokenizer can't spell this text"),
        ("end in the text", 1, 0, "token 0 ('<eos>') isn't allowed; allowed is 'a'"),
    ],
)
def test_a_refusal_says_where_and_why(
    by_id: dict[str, dict[str, Any]], name: str, text: int, at: int | None, why: str | None
) -> None:
    result = by_id[name]["results"][text]
    assert result["at"] == at
    assert result["why"] == why or (why and result["why"].startswith(why))


@pytest.mark.parametrize("name", REFUSED)
def test_a_spec_is_refused(by_id: dict[str, dict[str, Any]], name: str) -> None:
    report = by_id[name]
    assert report["refused"]["reason"] == REFUSED[name][1]
    assert report["refused"]["message"]
    assert not report["compiled"]
    assert report["backend"] is None
    assert report["compile_ms"] is None
    assert report["results"] == []


def test_what_is_not_enforced_is_listed(by_id: dict[str, dict[str, Any]]) -> None:
    listed = [{"pointer": "", "keyword": "uniqueItems"}]
    assert by_id["unenforced"]["unenforced"] == listed
    assert by_id["opted in"]["unenforced"] == listed
    assert accepted(by_id["opted in"]) == [True]


def test_a_bad_line_is_refused_and_the_run_goes_on(reports: list[dict[str, Any]]) -> None:
    for report in reports[-len(BAD_LINES) :]:
        assert report["refused"]["reason"] == "CASE_INVALID"
        assert report["results"] == []


def test_a_real_tokenizer() -> None:
    texts = ['{"n": "naïve 日本語 😀"}', f'{{"n": "{END}"}}', '{"n": "a" }x']
    schema = {"type": "object", "properties": {"n": {"type": "string"}}}
    lines = [case(number, {"type": "json_schema", "source": schema}, texts) for number in range(20)]
    reports = run(deepseek_path(), "-", given=b"\n".join(lines))
    assert [report["id"] for report in reports] == [*range(20)]
    for report in reports:
        assert accepted(report) == [True, False, False]
        assert report["results"][1]["why"].startswith(f"token 4 ({END!r}) isn't allowed")


def test_a_tokenizer_that_changes_texts_and_names_no_end(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "odd.json", end=False, space_first=True)
    line = case("odd", {"type": "regex", "source": "(abc)+"}, ["abcabcabcabc", " abc", "abca", ""])
    (report,) = run(tokenizer, write(tmp_path / "cases.jsonl", [line]))
    assert accepted(report) == [True, False, False, False]
    assert [result["at"] for result in report["results"]] == [None, 0, None, None]


def test_progress_is_shown_on_a_terminal(tokenizer: Path, tmp_path: Path) -> None:
    cases = write(tmp_path / "cases.jsonl", [case(1, {"type": "regex", "source": "a"}, ["a"])])
    ours, theirs = pty.openpty()
    command = [*COMMAND, "--tokenizer", str(tokenizer), "--cases", str(cases)]
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how the end of a terminal reads
            while part := terminal.read(4096):
                shown += part
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert b"1/1" in shown
    assert json.loads(output)["id"] == 1


@pytest.mark.parametrize(
    ("tokenizer_name", "cases_name", "said"),
    [("small.json", "none", "No such file"), ("none", "cases.jsonl", "doesn't exist")],
)
def test_a_file_that_cannot_be_read_ends_the_run(
    tmp_path: Path, tokenizer_name: str, cases_name: str, said: str
) -> None:
    save_tokenizer(tmp_path / "small.json")
    write(tmp_path / "cases.jsonl", [b"no JSON"])
    command = [*COMMAND, "--tokenizer", tokenizer_name, "--cases", cases_name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert done.stdout == ""
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_case_without_end_is_timed_out(tokenizer: Path, tmp_path: Path) -> None:
    quick = {"type": "regex", "source": "a+"}
    lines = [case(number, quick, ["aa", "b"]) for number in range(4)]
    lines.insert(2, case("endless", ENDLESS, [ENDLESS_TEXT]))
    reports = run(tokenizer, write(tmp_path / "cases.jsonl", lines), "--timeout", "3")
    assert [report["id"] for report in reports] == [0, 1, "endless", 2, 3]
    for report in reports:
        if report["id"] == "endless":
            assert report["refused"]["reason"] == "CHECK_TIMEOUT"
        else:
            assert accepted(report) == [True, False]


@pytest.fixture
def endless_run(tokenizer: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run with one case that ends only by force, and others around it."""
    quick = {"type": "choice", "source": ["yes", "no"]}
    lines = [case(number, quick, ["yes", "ye"]) for number in range(40)]
    lines.insert(20, case("endless", ENDLESS, [ENDLESS_TEXT]))
    cases = write(tmp_path / "cases.jsonl", lines)
    command = [*COMMAND, "--tokenizer", str(tokenizer), "--cases", str(cases), "--timeout", "250"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def stepping_worker(process: subprocess.Popen[bytes], after: int = 0) -> psutil.Process:
    """The worker of the endless run, another than before, once it is lost in its steps."""
    found: list[psutil.Process] = []

    def lost() -> bool:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                # Its first thread starts it; only steps keep another one busy.
                busy = [thread.user_time for thread in child.threads() if thread.id != child.pid]
                if child.pid != after and max(busy, default=0) > 2:
                    found.append(child)
        return bool(found)

    wait_until(lost, SECONDS)
    return found[0]


def lives(process: psutil.Process) -> bool:
    """Whether it runs: an orphan may wait as a zombie until whoever adopts it looks."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_case_whose_worker_dies_each_time(endless_run: subprocess.Popen[bytes]) -> None:
    first = stepping_worker(endless_run)
    first.kill()
    stepping_worker(endless_run, first.pid).kill()
    output, _ = endless_run.communicate(timeout=SECONDS)
    assert endless_run.returncode == 0
    reports = [json.loads(line) for line in output.splitlines()]
    guilty = reports.pop(20)
    assert guilty["id"] == "endless"
    assert guilty["refused"]["reason"] == "CHECK_CRASHED"
    assert "SIGKILL" in guilty["refused"]["message"]
    assert [report["id"] for report in reports] == [*range(40)]
    assert all(accepted(report) == [True, False] for report in reports)


def test_a_run_that_is_stopped_leaves_nothing(
    endless_run: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    worker = stepping_worker(endless_run)
    family = [worker, *worker.children(recursive=True)]
    regions = [file.path for file in worker.memory_maps() if file.path.endswith(".masks")]
    assert regions
    endless_run.terminate()
    assert endless_run.wait(SECONDS) == 143
    wait_until(lambda: not any(map(lives, family)), 60)
    assert [path.name for path in tmp_path.iterdir()] == ["cases.jsonl"]
    assert not any(Path(region).parent.exists() for region in regions)
