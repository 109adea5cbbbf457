"""A tiny model on disk for an engine to load: its tokenizer is trained here, its weights random."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END, START, THINK, THOUGHT, CALL, CALLED = SPECIALS = (
    "<|im_end|>",
    "<|im_start|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
VOCABULARY = 640
"""Columns of the logits; the tokenizer has fewer tokens, as many a real one."""

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = [
    '{"name": "Ada", "age": 36, "tags": ["one", "two"], "ok": true, "none": null}',
    "The quick brown fox jumps over the lazy dog. " * 4,
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>',
]


def build(path: Path, layers: int = 2) -> Path:
    """Writes the model's directory; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    # As Qwen has it: markers of thoughts and calls are tokens of their own, but not special.
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS[:2]])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in SPECIALS[2:]])
    assert tokenizer.get_vocab_size() < VOCABULARY
    tokenizer.save(str(path / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    write = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "chat_template": _TEMPLATE,
            "model_max_length": 4096,
        },
        "generation_config.json": {"eos_token_id": end},
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "eos_token_id": end,
            "torch_dtype": "bfloat16",
        },
    }
    for name, content in write.items():
        (path / name).write_text(json.dumps(content))
    return path
