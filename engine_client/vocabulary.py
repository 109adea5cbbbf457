"""What a grammar needs of a tokenizer: the bytes of each token, and which tokens are special.

Bytes come from the tokenizer's own decoder, never from the look of a token: a grammar constrains
the text that the engine shows, and that text is what the decoder makes of the tokens.
"""

import hashlib
import json
import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_VOCABULARY = 4_194_304
"""Most tokens of a vocabulary, and most columns of logits; the service's limit."""

# How the end is usually called. Only for a tokenizer.json of which nothing says how it ends.
_END_NAMES = (
    *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|im_end|>", "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
_NAMED_TOKENS = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_BYTES_BY_HAND = "or build Vocabulary(tokens=[bytes by id], width=...) yourself"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Vocabulary:
    """The tokens of a model, by content. Immutable, fit for pickle and weak keys; compare by `id`.

    Attributes:
        tokens: Bytes of each token by id, exactly as it decodes; b"" for an id that has none, and
            the name of a special token, b"<|eot|>". 1 to MAX_VOCABULARY.
        width: Columns of the model's logits, in tokens; less or more than len(tokens).
        stop_token_ids: Ids that end a sequence, ascending. Each has a token and a column.
        special_token_ids: Ids that no text matches, ascending. Each has a token.
        id: The content hash that names the tokenizer to the service (Tokenizer.id).

    Raises ValueError for anything out of range. Order and repeats of ids don't matter.
    """

    tokens: Sequence[bytes] = field(repr=False)
    width: int
    stop_token_ids: tuple[int, ...] = ()
    special_token_ids: tuple[int, ...] = field(default=(), repr=False)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        tokens = tuple(self.tokens)
        if not 1 <= len(tokens) <= MAX_VOCABULARY:
            raise ValueError(f"a vocabulary has 1 to {MAX_VOCABULARY} tokens, not {len(tokens)}")
        odd = next((i for i, kind in enumerate(map(type, tokens)) if kind is not bytes), None)
        if odd is not None:
            raise ValueError(f'token {odd} isn\'t bytes: pass what it decodes to, b"" for nothing')
        width = operator.index(self.width)
        if not 1 <= width <= MAX_VOCABULARY:
            raise ValueError(
                f"width is 1 to {MAX_VOCABULARY}, not {width}: pass the columns of the model's "
                "logits (vocab_size in its config.json)"
            )
        # A stop token that can't be produced, or never be allowed, would keep a sequence from
        # ending, so it is refused here and not dropped.
        stops = _ascending("stop", self.stop_token_ids, min(width, len(tokens)))
        specials = _ascending("special", self.special_token_ids, len(tokens))
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "stop_token_ids", stops)
        object.__setattr__(self, "special_token_ids", specials)
        object.__setattr__(self, "id", _content_hash(tokens, width, stops, specials))

    @classmethod
    def from_huggingface(
        cls, tokenizer: Any, *, width: int | None = None, stop_token_ids: Iterable[int] = ()
    ) -> Self:
        """The vocabulary of a loaded tokenizer.

        Args:
            tokenizer: A `tokenizers.Tokenizer`, or a fast one of transformers, whose end of
                sequence joins the stop tokens (with a warning instead when it can't be produced).
            width: Columns of the model's logits; None means one for each token.
            stop_token_ids: More stop tokens, as from the model's generation configuration.

        Raises ValueError when the bytes of a token aren't a matter of that token alone (WordPiece
        and the like), and for whatever Vocabulary refuses.
        """
        found = _ids(getattr(tokenizer, "eos_token_id", None))
        return cls._build(tokenizer, width, stop_token_ids, found)

    @classmethod
    def from_path(
        cls, path: str | Path, *, width: int | None = None, stop_token_ids: Iterable[int] = ()
    ) -> Self:
        """The vocabulary of a model's directory, or of a tokenizer file alone.

        Stop tokens are the union of those given and what generation_config.json, config.json,
        tokenizer_config.json and special_tokens_map.json call the end of sequence. Only if all of
        these say nothing, special tokens with a usual name (`</s>`, `<|im_end|>` ...) are taken.

        Args:
            path: A directory, or a file in the format of tokenizer.json. The configurations beside
                a file count if its name is tokenizer.json.
            width: Columns of the model's logits; None takes vocab_size of config.json (of its
                text_config, if it has one), or else one column for each token.
            stop_token_ids: More stop tokens.

        Raises ValueError as load_tokenizer and from_huggingface do.
        """
        path, given = Path(path), tuple(stop_token_ids)
        tokenizer = _load(path)
        backend = backend_of(tokenizer)
        found = _ids(getattr(tokenizer, "eos_token_id", None))
        model = {}
        for config in _configs(path, "generation_config.json", "config.json"):
            # The language model of a multimodal one has a section of its own.
            model = config | (config.get("text_config") or {})
            found |= _ids(config.get("eos_token_id")) | _ids(model.get("eos_token_id"))
        for config in _configs(path, *_TOKENIZER_CONFIGS):
            if end := _content(config.get("eos_token")):
                found |= _ids(backend.token_to_id(end))
        if not found and not given:
            added = backend.get_added_tokens_decoder().items()
            found = {i for i, token in added if token.special and token.content in _END_NAMES}
        if width is None:
            width = model.get("vocab_size")
        return cls._build(tokenizer, width, given, found)

    @classmethod
    def _build(
        cls, tokenizer: Any, width: int | None, given: Iterable[int], found: set[int]
    ) -> Self:
        backend = backend_of(tokenizer)
        decode = _token_decoder(backend)
        added = backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        special.update(getattr(tokenizer, "all_special_ids", ()))
        tokens = []  # an added token that isn't special goes through the decoder like any other
        for index in range(max(backend.get_vocab().values(), default=-1) + 1):
            piece = backend.id_to_token(index) or ""
            tokens.append(piece.encode() if index in special else decode(piece))
        width = len(tokens) if width is None else width
        usable = {i for i in found if 0 <= i < min(width, len(tokens))}
        if usable != found:
            left_out = sorted(found - usable)
            _log.warning("configured stop tokens without a token or a logit: %s", left_out)
        return cls(tokens, width, tuple({*given, *usable}), tuple(special))


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer of a directory or a tokenizer.json, to encode with. Needs no network.

    As in transformers, tokens that only tokenizer_config.json or special_tokens_map.json know are
    added, and those that they call special are special. A directory without tokenizer.json is
    read by transformers. Raises ValueError when there is no tokenizer that can be read.
    """
    return backend_of(_load(Path(path)))


def _ascending(kind: str, ids: Iterable[int], limit: int) -> tuple[int, ...]:
    unique = sorted({operator.index(i) for i in ids})
    for i in unique:
        if not 0 <= i < limit:
            raise ValueError(
                f"{kind} token id {i} is out of range, 0 to {limit - 1}: leave it out, or pass "
                "the tokens (and for a stop token the width) of the model that it belongs to"
            )
    return tuple(unique)


def _content_hash(
    tokens: tuple[bytes, ...], width: int, stops: tuple[int, ...], specials: tuple[int, ...]
) -> str:
    """As grammar.v1.Tokenizer.id says."""
    numbers = [len(tokens), width, len(stops), *stops, len(specials), *specials]
    digest = hashlib.sha256(b"grammar.v1.token")
    digest.update(np.array(numbers, dtype="<u4").tobytes())
    digest.update(np.fromiter(map(len, tokens), dtype="<u4", count=len(tokens)).tobytes())
    digest.update(b"".join(tokens))
    return "tok-" + digest.hexdigest()[:32]


def _token_decoder(backend: "Tokenizer") -> Callable[[str], bytes]:
    """How the tokenizer's decoder turns one token into bytes, wherever in a text it stands.

    A decoder is a chain. Exact token by token is: replacing strings, then making bytes, then what
    touches nothing but the start of the whole text (generation goes on after a prompt).
    """
    replacements: list[tuple[str, str]] = []
    to_bytes: Callable[[str], bytes] | None = None
    joined = False
    # Without a decoder, tokenizers puts a space between any two tokens.
    parts = parts_of(backend.decoder) if backend.decoder is not None else [{"type": "None"}]
    for part in parts:
        text = not joined and to_bytes is None
        match part:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if text:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": old} if text:
                replacements.append((old, " "))
            case {"type": "ByteFallback"} if text:
                to_bytes = _byte_fallback
            case {"type": "ByteLevel"} if text:
                to_bytes, joined = _byte_level, True
            case {"type": "Fuse"}:
                joined = True
            case {"type": "Strip", "stop": 0} if joined:
                pass
            case _:
                chain = " > ".join(p["type"] for p in parts)
                raise ValueError(
                    f"the bytes of single tokens can't be told from the decoder {chain}: in "
                    f"{part['type']} they may depend on a token's neighbours. Take the tokenizer "
                    f"of a generative model, {_BYTES_BY_HAND}"
                )
    encode = to_bytes or str.encode

    def decode(piece: str) -> bytes:
        for old, new in replacements:
            piece = piece.replace(old, new)
        return encode(piece)

    return decode


# GPT-2's: printable Latin-1 stands for itself, and U+0100 onwards for the other bytes.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))
}
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[char] for char in piece])
    except KeyError:  # one foreign character, and the decoder leaves the whole token as it is
        return piece.encode()


def _byte_fallback(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.encode()


def parts_of(component: Any) -> list[dict[str, Any]]:
    """The steps of a decoder or normalizer, sequences unrolled."""

    def unroll(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if state["type"] != "Sequence":
            yield state
        for part in state.get("decoders") or state.get("normalizers") or ():
            yield from unroll(part)

    try:
        return list(unroll(json.loads(component.__getstate__()))) if component is not None else []
    except Exception:  # written in Python; the library raises no narrower class
        return [{"type": "Custom"}]


def backend_of(tokenizer: Any) -> "Tokenizer":
    """The `tokenizers.Tokenizer` that it is or has. Raises ValueError."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"{type(tokenizer).__name__} isn't a tokenizers.Tokenizer and doesn't have one: load "
            f"the fast tokenizer, {_BYTES_BY_HAND}"
        )
    return backend


def _load(path: Path) -> Any:
    if not path.exists():
        raise ValueError(f"{path} doesn't exist: download the model, and pass its directory")
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if not file.exists():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # neither library raises a narrower class
        raise ValueError(
            f"{path} has no tokenizer that can be read: pass a tokenizer.json, or a directory with "
            f"one ({error})"
        ) from error
    _add_tokens(tokenizer, path)
    return tokenizer


def _add_tokens(backend: "Tokenizer", path: Path) -> None:
    """Adds what the configurations beside a tokenizer.json name, as transformers does."""
    from tokenizers import AddedToken

    named: list[str | None] = []
    for config in _configs(path, *_TOKENIZER_CONFIGS):
        listed = config.get("added_tokens_decoder") or {}
        backend.add_tokens([AddedToken(**listed[i]) for i in sorted(listed, key=int)])
        named += [_content(config.get(key)) for key in _NAMED_TOKENS]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = config.get(key) or ()
            named += map(_content, more.values() if isinstance(more, dict) else more)
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens([n for n in dict.fromkeys(named) if n and n not in special])


def _configs(path: Path, *names: str) -> Iterator[dict[str, Any]]:
    """Those of the named configurations that stand beside the tokenizer."""
    if not (path.is_dir() or path.name == "tokenizer.json"):
        return
    directory = path if path.is_dir() else path.parent
    for file in (directory / name for name in names):
        if file.exists():
            try:
                config = json.loads(file.read_bytes())
            except ValueError as error:
                raise ValueError(f"{file} isn't JSON: mend or remove it ({error})") from error
            if not isinstance(config, dict):
                raise ValueError(f"{file} isn't a JSON object: mend or remove it")
            yield config


def _content(token: Any) -> str | None:
    """A token of a configuration: its text, or an object that has it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _ids(value: Any) -> set[int]:
    """Token ids of a configuration: one, a list, or none."""
    return {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
