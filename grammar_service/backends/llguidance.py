"""The llguidance backend. The only module that imports llguidance.

What it does beyond calling the library, each measured with llguidance 1.9.1:
- The grammar is wrapped in Lark with `no_forcing`: otherwise, where bytes are forced, a mask allows
  only the tokens that the library itself would write them with.
- Stop tokens are ours. The library knows one end token for a tokenizer, a sequence has several of
  its own: it is told one, and the stop bits of each row are written here.
- There is no artifact: building a matcher is the compile, about 2 ms. A child builds it first, so
  that what crashes or doesn't end does so there; the service builds it again, and copies it.
- The library never raises for a grammar, a token or a limit; a matcher in error stays in error.
"""

import json
import threading
from collections.abc import Sequence
from importlib.metadata import version
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine_client.spec import GrammarSpec, GrammarType
from engine_client.vocabulary import Vocabulary
from grammar_service.errors import Invalid

_HEAD = '%llguidance {"no_forcing": true}\n'
# All copies of a matcher share a lexer, so one that ends at a limit of it ends them all; with the
# default limits that happened to one of 298 public schemas.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=10_000_000,
    step_lexer_fuel=5_000_000,
    max_lexer_states=1_000_000,
    verbose_errors=False,
)
# Resident memory of 2,000 copies of a small object schema's matcher, at the start and after 100
# tokens; the lexer's states are shared by all copies and grow to some MB a grammar.
_COMPILED_BYTES = 2_000_000
_MATCHER_BYTES = 4_000
_MATCHER_BYTES_A_TOKEN = 250


class _Matcher:
    """A library matcher, its stop tokens, and whether one of them ended it."""

    __slots__ = ("ended", "inner", "stops")

    def __init__(self, inner: LLMatcher, stops: tuple[int, ...]) -> None:
        self.inner = inner
        self.stops = stops
        self.ended = False


class _Compiled:
    """What all matchers of a grammar are copies of."""

    __slots__ = ("prototype", "size")

    def __init__(self, prototype: LLMatcher, size: int) -> None:
        self.prototype = prototype
        self.size = size


class LLGuidanceBackend:
    """Matches with LLMatcher, fills with LLExecutor."""

    name = "llguidance"
    version = version("llguidance")

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._local = threading.local()
        self._tokenizers: WeakKeyDictionary[Vocabulary, LLTokenizer] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Builds the tokenizer; 0.4 s for 129k tokens."""
        try:
            self._tokenizer(vocabulary)
        except Invalid:
            return  # each spec says so

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> bytes:
        """Builds a matcher to see whether it can be built; the artifact is the grammar's text."""
        text = _lark(spec)
        self._build(text, vocabulary)
        return text.encode()

    def load(self, artifact: bytes, spec: GrammarSpec, vocabulary: Vocabulary) -> _Compiled:
        """Builds the matcher that all others are copies of."""
        return _Compiled(self._build(artifact.decode(), vocabulary), len(artifact))

    def memory_bytes(self, compiled: _Compiled) -> int:
        """An estimate: the library tells none."""
        return _COMPILED_BYTES + 10 * compiled.size

    def matcher(self, compiled: _Compiled, stop_token_ids: Sequence[int]) -> _Matcher:
        """A matcher at the start."""
        return _Matcher(compiled.prototype.deep_copy(), tuple(stop_token_ids))

    def matcher_bytes(self, length: int) -> int:
        """Estimated memory of a matcher that took `length` tokens."""
        return _MATCHER_BYTES + _MATCHER_BYTES_A_TOKEN * length

    def fork(self, matcher: _Matcher) -> _Matcher:
        """An independent copy."""
        copy = _Matcher(matcher.inner.deep_copy(), matcher.stops)
        copy.ended = matcher.ended
        return copy

    def accept(self, matchers: Sequence[_Matcher], tokens: Sequence[int]) -> list[bool]:
        """One token for each matcher."""
        return [_accept(matcher, token) for matcher, token in zip(matchers, tokens, strict=True)]

    def rollback(self, matchers: Sequence[_Matcher], counts: Sequence[int]) -> None:
        """Takes back each matcher's last tokens."""
        for matcher, count in zip(matchers, counts, strict=True):
            # The library never saw the stop token.
            inner_count = count - 1 if matcher.ended else count
            matcher.ended = False
            if inner_count and not matcher.inner.rollback(inner_count):
                raise RuntimeError(matcher.inner.get_error())

    def completed(self, matchers: Sequence[_Matcher]) -> list[bool]:
        """Whether each matcher may end now."""
        return [bool(matcher.inner.is_accepting()) for matcher in matchers]

    def terminated(self, matcher: _Matcher) -> bool:
        """Whether a stop token was accepted."""
        return matcher.ended

    def fill(self, matchers: Sequence[_Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """Writes the mask of each matcher to its row. Raises RuntimeError for one in error."""
        words = masks.numpy().view(np.uint32)
        try:
            self._compute(matchers, masks, rows)
        except Exception:
            for matcher, row in zip(matchers, rows, strict=True):
                self._compute_one(matcher, masks, row)
        for matcher, row in zip(matchers, rows, strict=True):
            may_end = matcher.inner.is_accepting()
            for token in matcher.stops:
                bit = np.uint32(1 << (token % 32))
                if may_end:
                    words[row, token // 32] |= bit
                else:
                    words[row, token // 32] &= ~bit

    def _compute(
        self, matchers: Sequence[_Matcher], masks: torch.Tensor, rows: Sequence[int]
    ) -> None:
        pairs = [(matcher.inner, row) for matcher, row in zip(matchers, rows, strict=True)]
        self._executor().unsafe_compute_mask_ptr(
            pairs, masks.data_ptr(), masks.shape[1] * 4, masks.shape[0]
        )

    def _compute_one(self, matcher: _Matcher, masks: torch.Tensor, row: int) -> None:
        """Where nothing of the vocabulary goes on, the library errs; that is an empty mask."""
        try:
            self._compute([matcher], masks, [row])
        except Exception:
            if not matcher.inner.stop_reason().startswith("NoExtension"):
                raise
            masks[row] = 0

    def _build(self, text: str, vocabulary: Vocabulary) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer(vocabulary), text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise Invalid("SPEC_UNSUPPORTED", f"llguidance: {matcher.get_error()[:1000]}")
        return matcher

    def _executor(self) -> LLExecutor:
        """One a calling thread, as its pool serves one call at a time."""
        executor: LLExecutor | None = getattr(self._local, "executor", None)
        if executor is None:
            executor = self._local.executor = LLExecutor(self._threads)
        return executor

    def _tokenizer(self, vocabulary: Vocabulary) -> LLTokenizer:
        with self._lock:
            if vocabulary not in self._tokenizers:
                wrapper = TokenizerWrapper(_Bytes(vocabulary))
                self._tokenizers[vocabulary] = LLTokenizer(wrapper, n_vocab=vocabulary.width)
            return self._tokenizers[vocabulary]


class _Bytes:
    """A vocabulary as the library takes it. It is never asked to tokenize: nothing is forced."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens[: vocabulary.width]
        textless = [i for i in vocabulary.special_token_ids if i < len(tokens)]
        ends = [*vocabulary.stop_token_ids, *textless]
        ends += [i for i, token in enumerate(tokens) if not token][:1]
        if not ends:
            raise Invalid(
                "SPEC_UNSUPPORTED",
                "llguidance needs an end token, and this vocabulary has no stop or special token",
            )
        # Padded by hand: n_vocab doesn't widen a vocabulary that is given like this.
        self.tokens = [*tokens, *[b""] * (vocabulary.width - len(tokens))]
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = sorted({*textless, ends[0]})

    def __call__(self, text: bytes | str) -> list[int]:
        return []


def _accept(matcher: _Matcher, token: int) -> bool:
    if matcher.ended:
        return False
    if token in matcher.stops:
        matcher.ended = bool(matcher.inner.is_accepting())
        return matcher.ended
    return bool(matcher.inner.try_consume_tokens([token]))


def _lark(spec: GrammarSpec) -> str:
    """The spec in the library's own language."""
    match spec.type:
        case GrammarType.JSON_SCHEMA:
            return f"{_HEAD}start: %json {_with_options(spec)}"
        case GrammarType.REGEX:
            escaped = spec.source.replace("/", "\\/").replace("\n", "\\n")
            return f"{_HEAD}start: /{escaped}/"
        case GrammarType.CHOICE:
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in spec.choices)
            return f"{_HEAD}start: {texts}"
        case GrammarType.LARK:
            return f"{_HEAD}{spec.source}"
        case _:
            raise Invalid("SPEC_UNSUPPORTED", f"llguidance doesn't speak {spec.type}")


def _with_options(spec: GrammarSpec) -> str:
    schema = json.loads(spec.source)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if spec.max_whitespace:
        white = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{spec.max_whitespace}}}"}
        schema["x-guidance"] = {"whitespace_flexible": True, **white}
    else:
        schema["x-guidance"] = {
            "whitespace_flexible": False,
            "item_separator": spec.item_separator,
            "key_separator": spec.key_separator,
        }
    return json.dumps(schema)
