"""Engines for tests: vLLM in this process, and its OpenAI server as a process of its own."""

import contextlib
import gc
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import torch
from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams

from engine_client import PendingStep, Row, StepResult
from engine_client.vllm.manager import GrammarManager
from tests.support import ServiceProcess

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
"""Small enough for a model of random weights to come to its end."""

CRAMPED: dict[str, Any] = {
    "num_gpu_blocks_override": 14,
    "block_size": 32,
    "enable_prefix_caching": False,
    "max_model_len": 200,
}
"""Room for the prompts of eight requests, not for all that they generate: some are preempted."""


def params(tokens: int = 300, seed: int = 0, **constraint: Any) -> SamplingParams:
    """How a constrained request samples; without a constraint, a free one."""
    wanted = StructuredOutputsParams(**constraint) if constraint else None
    return SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, structured_outputs=wanted)


@contextlib.contextmanager
def environment(service: ServiceProcess | None, **settings: str) -> Iterator[None]:
    """The settings under which an engine that is made inside finds the service."""
    values = {f"GRAMMAR_CLIENT_{name.upper()}": value for name, value in settings.items()}
    if service is not None:
        values["GRAMMAR_CLIENT_TARGET"] = service.target
        values["GRAMMAR_CLIENT_REGION_DIR"] = str(service.region_dir)
    with mock.patch.dict(os.environ, values):
        yield


@contextlib.contextmanager
def engine(
    model: Path, service: ServiceProcess, settings: dict[str, str] | None = None, **options: Any
) -> Iterator[LLM]:
    """VLLM in this process, masked by a service."""
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "disable_log_stats": False,
    }
    with environment(service, **(settings or {})):
        made = LLM(model=str(model), **(arguments | options))
        # Once is enough, and a second time fails when numba was loaded in between (ngram does).
        type(current_platform).register_triton_kernel_overrides = lambda platform: None
        try:
            yield made
        finally:
            made.llm_engine.engine_core.shutdown()
            del made
            cleanup_dist_env_and_memory()
            gc.collect()


def manager(llm: LLM) -> GrammarManager:
    """The structured-output manager of an engine in this process."""
    found = llm.llm_engine.engine_core.engine_core.structured_output_manager
    assert isinstance(found, GrammarManager)
    return found


def texts(outputs: list[RequestOutput]) -> list[str]:
    """The text of each request's first completion."""
    return [output.outputs[0].text for output in outputs]


def calls(llm: LLM) -> int:
    """Steps that the client has sent so far."""
    return manager(llm).grammars.client.stats.snapshot().get("steps", 0)


def decode(
    llm: LLM,
    wanted: Sequence[tuple[str, SamplingParams]],
    between: Callable[[int], None] = lambda step: None,
) -> list[CompletionOutput]:
    """Runs requests step by step, and something else after each step; their completions.

    `between` is told how many steps had masks: before the first, grammars may still be compiled.
    """
    before = manager(llm).steps
    base = uuid.uuid4().hex[:8]
    for index, (prompt, sampled) in enumerate(wanted):
        llm.llm_engine.add_request(f"{base}-{index}", prompt, sampled)
    done: dict[str, CompletionOutput] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
        between(manager(llm).steps - before)
    return [done[f"{base}-{index}"] for index in range(len(wanted))]


class Record:
    """Every mask that an engine got, with the history that it is for."""

    def __init__(self, llm: LLM) -> None:
        self._client = manager(llm).grammars.client
        self._collect = self._client.collect
        self._masks: list[tuple[Row, list[int], torch.Tensor]] = []
        self._client.collect = self._keep  # type: ignore[method-assign]

    def _keep(self, step: PendingStep) -> StepResult:
        result = self._collect(step)
        for index, row in enumerate(step.rows):
            first, count = result.mask_rows[index], 1 + len(row.drafts)
            for drafts in range(min(count, result.legal_drafts[index] + 1)):
                history = [*row.tokens, *row.drafts[:drafts]]
                self._masks.append((row, history, result.masks[first + drafts].clone()))
        return result

    def check(self) -> int:
        """Each mask is that of a new sequence with the same tokens; returns how many there were."""
        for number, (row, history, mask) in enumerate(self._masks):
            again = Row(f"again-{number}", row.grammar, history, stop_token_ids=row.stop_token_ids)
            result = self._collect(self._client.submit([again]))
            assert torch.equal(result.mask(0), mask), (history, result.notes)
            self._client.close_sequences([again.sequence_id])
        return len(self._masks)


def valid(completion: CompletionOutput) -> bool:
    """Whether a completion came to its end and is an instance of SCHEMA."""
    jsonschema.validate(json.loads(completion.text), SCHEMA)
    return bool(completion.finish_reason == "stop")
