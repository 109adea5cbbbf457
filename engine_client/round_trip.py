"""Checks what a vocabulary has for bytes against the tokenizer that it came from."""

import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from engine_client.vocabulary import Vocabulary, backend_of, parts_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_SAMPLES = (
    "Hello, world!",
    " leading",
    "trailing ",
    "two  three   spaces",
    "    indented:\n\ttab\r\n\n  twice\n",
    '{"key": "line\\n \\"quoted\\" \\u00e9 \\\\", "n": [-1.5e10, null, true]}',
    "na\u00efve caf\u00e9 \u00df",
    "日本語、中文。 한국어",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "e\u0301 a\u030a \u0e19\u0e49\u0e33",
)
"""What round_trip encodes unless told otherwise."""

_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


def round_trip(
    vocabulary: Vocabulary, tokenizer: Any, samples: Iterable[str] = DEFAULT_SAMPLES
) -> list[str]:
    """Checks the bytes of a vocabulary against the tokenizer that it came from.

    Each sample is encoded without special tokens, and the bytes of its tokens have to be its
    UTF-8. Two things that a tokenizer does to a text are allowed: one space put before it, and a
    Unicode normal form (NFC in Qwen's). Returns a description of each mismatch, for people; none
    when all is well. Raises ValueError for a tokenizer without a `tokenizers` backend.
    """
    backend = backend_of(tokenizer)
    forms = [p["type"] for p in parts_of(backend.normalizer) if p["type"] in _NORMAL_FORMS]
    problems = []
    for sample in samples:
        encoding = backend.encode(sample, add_special_tokens=False)
        ids = [i for i, on in zip(encoding.ids, encoding.attention_mask, strict=True) if on]
        if max(ids, default=0) >= len(vocabulary.tokens):
            problems.append(f"{sample!r}: token {max(ids)} isn't in the vocabulary")
            continue
        text = sample
        for form in forms:
            text = unicodedata.normalize(form, text)
        wanted, got = text.encode(), b"".join(vocabulary.tokens[i] for i in ids)
        prepends = _prepends_space(backend, sample)
        if got == wanted or (prepends and got == b" " + wanted):
            continue
        own = backend.decode(ids, skip_special_tokens=False)
        space = " (or with the space that this tokenizer puts before a text)" if prepends else ""
        agree = got.decode(errors="replace") in (own, " " + own)
        blame = "the tokenizer changes this text" if agree else "the vocabulary's bytes are wrong"
        problems.append(
            f"{sample!r}: expected {wanted!r}{space}, but the tokens {ids} have {got!r}, and the "
            f"tokenizer decodes them to {own!r}: {blame}"
        )
    return problems


def _prepends_space(backend: "Tokenizer", text: str) -> bool:
    """Whether the tokenizer encodes one space more than there are. Some spare a text with one."""
    probe = " x" if text.startswith(" ") else "x"
    encoded = "".join(backend.encode(probe, add_special_tokens=False).tokens)
    return encoded in {mark * len(probe) + "x" for mark in ("\u2581", "\u0120", " ")}
