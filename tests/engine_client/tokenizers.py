"""Small tokenizers of each kind."""

from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LINES = ["The quick brown fox,", '{"name": "Zoë", "n": [1, 2]}', "日本語 text\n\tand more  spaces"]


def byte_level(**options: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    return backend


def of_pieces(*pieces: str, decoder: Any = None) -> Tokenizer:
    """A tokenizer that has just these pieces, by id."""
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoder or decoders.ByteLevel()
    return backend


def in_transformers(backend: Tokenizer, **tokens: str) -> Any:
    return cast(Any, PreTrainedTokenizerFast)(tokenizer_object=backend, **tokens)


def llama() -> Any:
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "e", "x", "lea"]
    backend = Tokenizer(models.Unigram([(p, -1.0) for p in pieces], 0, byte_fallback=True))
    backend.decoder = llama()
    return backend
