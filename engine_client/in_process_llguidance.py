"""Building and stepping llguidance matchers in this process.

As with `in_process`, two use it: the service's llguidance backend, and the client when the service
is gone. Imports llguidance.

What it does beyond calling the library, each measured with llguidance 1.9.1:
- The grammar is wrapped in Lark with `no_forcing`: otherwise, where bytes are forced, a mask allows
  only the tokens that the library itself would write them with.
- Stop tokens are ours. The library knows one end token for a tokenizer, a sequence has several of
  its own: it is told one, and the stop bits of each row are written here.
- Where nothing of the vocabulary goes on, the library errs; that is an empty mask.
- It never raises for a grammar, a token or a limit; a matcher in error stays in error.
"""

import json
import re
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine_client.spec import GrammarSpec, GrammarType
from engine_client.vocabulary import Vocabulary

_HEAD = '%llguidance {"no_forcing": true}\n'
# All copies of a matcher share a lexer, so one that ends at a limit of it ends them all; with the
# default limits that happened to one of 298 public schemas. An object of 400 optional properties
# has 2,014 items in a row, over the default of 2,000; what a mask may take, step_max_items bounds.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=10_000_000,
    step_lexer_fuel=5_000_000,
    max_lexer_states=1_000_000,
    max_items_in_row=50_000,
    verbose_errors=False,
)

# The library computes the masks of these sets of tokens once. Its own have U+2028 and U+2029 in
# them, which `.` hasn't, so that each step of `.*` walked the vocabulary: 870 us rather than 53.
_TEXT = r'[^"\\\x00-\x1F\x7F\u2028\u2029]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", f"{_TEXT}{{1,10}}", f"{_TEXT}{{1,30}}", f"{_TEXT}+"]

_tokenizers: WeakKeyDictionary[Vocabulary, LLTokenizer] = WeakKeyDictionary()
_lock = threading.Lock()


class Matcher:
    """A library matcher, its stop tokens, and whether one of them ended it."""

    __slots__ = ("end", "ended", "inner", "stops")

    def __init__(
        self, inner: LLMatcher, end: int, stops: Sequence[int], *, ended: bool = False
    ) -> None:
        self.inner = inner
        self.end = end
        """The library's one end token, which needn't be one of the sequence's."""
        self.stops = tuple(stops)
        self.ended = ended

    def accept(self, token: int) -> bool:
        """Takes a token; False leaves the matcher as it was. Raises RuntimeError past a limit."""
        if self.ended:
            return False
        if token in self.stops:
            self.ended = self.completed()
            return self.ended
        if self.inner.try_consume_tokens([token]):
            return True
        if self.inner.is_error():  # a limit; the token may well be legal
            raise RuntimeError(self.inner.get_error()[:1000])
        return False

    def rollback(self, count: int) -> None:
        """Takes tokens back. Raises RuntimeError if the matcher is in error."""
        if self.ended:  # the library never saw the stop token
            self.ended = False
            count -= 1
        if count and not self.inner.rollback(count):
            raise RuntimeError(self.inner.get_error())

    def completed(self) -> bool:
        """Whether the text may end now."""
        return bool(self.inner.is_accepting())

    def fork(self) -> "Matcher":
        """An independent copy."""
        return Matcher(self.inner.deep_copy(), self.end, self.stops, ended=self.ended)


def build(text: str, vocabulary: Vocabulary) -> LLMatcher:
    """A library matcher for what `lark_of` wrote. Raises ValueError with the library's reason."""
    matcher = LLMatcher(tokenizer_of(vocabulary), text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise ValueError(f"llguidance: {matcher.get_error()[:1000]}")
    return matcher


def fill(
    executor: LLExecutor, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]
) -> None:
    """Writes the mask of each matcher to its row of int32[n, words]. Raises for one in error."""
    try:
        _compute(executor, matchers, masks, rows)
    except Exception:
        for matcher, row in zip(matchers, rows, strict=True):
            _compute_one(executor, matcher, masks, row)
    words = masks.numpy().view(np.uint32)
    for matcher, row in zip(matchers, rows, strict=True):
        # Past a limit the library gives the end token alone, and says so only when asked.
        if matcher.inner.is_error() and not _at_dead_end(matcher):
            raise RuntimeError(matcher.inner.get_error()[:1000])
        words[row, matcher.end // 32] &= ~np.uint32(1 << (matcher.end % 32))
        may_end = matcher.inner.is_accepting()
        for token in matcher.stops:
            bit = np.uint32(1 << (token % 32))
            if may_end:
                words[row, token // 32] |= bit
            else:
                words[row, token // 32] &= ~bit


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """The vocabulary as the library has it; 0.4 s for 129k tokens. Raises ValueError."""
    with _lock:
        if vocabulary not in _tokenizers:
            wrapper = TokenizerWrapper(_Bytes(vocabulary))
            _tokenizers[vocabulary] = LLTokenizer(wrapper, n_vocab=vocabulary.width, slices=_SLICES)
        return _tokenizers[vocabulary]


def _compute(
    executor: LLExecutor, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]
) -> None:
    pairs = [(matcher.inner, row) for matcher, row in zip(matchers, rows, strict=True)]
    row_bytes = masks.shape[1] * 4
    executor.unsafe_compute_mask_ptr(pairs, masks.data_ptr(), row_bytes, masks.shape[0])


def _compute_one(executor: LLExecutor, matcher: Matcher, masks: torch.Tensor, row: int) -> None:
    try:
        _compute(executor, [matcher], masks, [row])
    except Exception:
        if not _at_dead_end(matcher):
            raise
        masks[row] = 0


def _at_dead_end(matcher: Matcher) -> bool:
    """Whether no token goes on, which is an error to the library, and an empty mask to us."""
    return bool(matcher.inner.get_error().startswith("NoExtension"))


class _Bytes:
    """A vocabulary as the library takes it. It is never asked to tokenize: nothing is forced."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens[: vocabulary.width]
        textless = [i for i in vocabulary.special_token_ids if i < len(tokens)]
        ends = [*vocabulary.stop_token_ids, *textless]
        ends += [i for i, token in enumerate(tokens) if not token][:1]
        if not ends:
            raise ValueError(
                "llguidance needs an end token, and this vocabulary has no stop or special token"
            )
        # Padded by hand: n_vocab doesn't widen a vocabulary that is given like this.
        self.tokens = [*tokens, *[b""] * (vocabulary.width - len(tokens))]
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = sorted({*textless, ends[0]})

    def __call__(self, text: bytes | str) -> list[int]:
        return []


def lark_of(spec: GrammarSpec) -> str:
    """The spec in the library's own language. Raises ValueError for one that it doesn't speak."""
    match spec.type:
        case GrammarType.JSON_SCHEMA if spec.source.startswith("%llguidance"):
            return f"{_HEAD}{spec.source}"  # the service's form of a schema
        case GrammarType.JSON_SCHEMA:
            return f"{_HEAD}start: %json {_with_options(spec)}"
        case GrammarType.REGEX:
            return f"{_HEAD}start: /{_delimited(spec.source)}/"
        case GrammarType.CHOICE:
            return f"{_HEAD}start: {' | '.join(map(_literal, spec.choices))}"
        case GrammarType.LARK:
            return f"{_HEAD}{spec.source}"
        case _:
            raise ValueError(f"llguidance doesn't speak {spec.type}")


def _literal(text: str) -> str:
    # JSON leaves U+007F as it is, Lark doesn't take it so.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _delimited(pattern: str) -> str:
    """A pattern between slashes: those that aren't escaped yet have to be."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")


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
            # Expressions, to the library.
            "item_separator": re.escape(spec.item_separator),
            "key_separator": re.escape(spec.key_separator),
        }
    return json.dumps(schema)
