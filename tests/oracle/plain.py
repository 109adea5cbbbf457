"""The oracle: the plain libraries, in this process, from nothing at each question.

It shares no code with the product: what is compiled how is written out here once more.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import xgrammar
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from outlines_core import Guide, Index
from outlines_core import Vocabulary as Tokens

from engine_client import Grammar, GrammarSpec, Outcome
from tests.support import toy

# Pieces of JSON, words and numbers, and two bytes of a character that no token has whole.
PIECES: list[str | bytes] = [
    "{", "}", "[", "]", ":", ",", '"', '":', '",', '{"', '"}', " ", "  ", "\n", "a", "b", "ab",
    "abc", "key", "name", "tag", "<", ">", "</", "<t>", "</t>", "0", "1", "2", "12", "-", ".", "e",
    "true", "false", "null", "yes", "no", "x", "y", "z", "\\", '\\"', "\\u", b"\xc3", b"\xa9",
    "<think>", "<eos>", "<end>",
]  # fmt: skip
THINK, EOS, END = len(PIECES) - 3, len(PIECES) - 2, len(PIECES) - 1
# Wider than the vocabulary: the columns past it can never be allowed.
VOCABULARY = toy(PIECES, stop=[EOS], special=[THINK, END], width=len(PIECES) + 20)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "key": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name"],
}
_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<t"],
        "tags": [
            {
                "begin": "<t>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</t>",
            }
        ],
    },
}
_BOUNDED_TAG: dict[str, Any] = {
    **_TAG,
    "format": {
        **_TAG["format"],  # type: ignore[dict-item]
        "tags": [
            {
                "begin": "<t>",
                "content": {
                    "type": "json_schema",
                    "json_schema": {"type": "integer"},
                    "max_whitespace_cnt": 8,
                },
                "end": "</t>",
            }
        ],
    },
}


class Matcher(Protocol):
    """A plain matcher. Stop tokens are the caller's."""

    def take(self, token: int) -> bool: ...

    def may_end(self) -> bool: ...

    def allowed(self) -> frozenset[int]: ...


class XGrammar:
    """Stop tokens are the matcher's own; it is told all of them."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stops: Sequence[int]) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stops))

    def take(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def allowed(self) -> frozenset[int]:
        words = xgrammar.allocate_token_bitmask(1, VOCABULARY.width)
        self._matcher.fill_next_token_bitmask(words)
        bits = words.numpy().view("<u4")[0]
        return frozenset(i for i in range(VOCABULARY.width) if bits[i // 32] >> (i % 32) & 1)


class LLGuidance:
    """It knows one end token; the others are added where it may end."""

    _tokenizer: LLTokenizer | None = None

    def __init__(self, lark: str, stops: Sequence[int]) -> None:
        if LLGuidance._tokenizer is None:
            LLGuidance._tokenizer = LLTokenizer(TokenizerWrapper(_Raw()), n_vocab=VOCABULARY.width)
        text = '%llguidance {"no_forcing": true}\n' + lark
        self._matcher = LLMatcher(LLGuidance._tokenizer, text, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()
        self._stops = frozenset(stops)

    def take(self, token: int) -> bool:
        if token in self._stops:
            return self.may_end()
        return bool(self._matcher.try_consume_tokens([token]))

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def allowed(self) -> frozenset[int]:
        raw = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        text = frozenset(np.unpackbits(raw, bitorder="little").nonzero()[0].tolist())
        return (text - {EOS} - self._stops) | (self._stops if self.may_end() else frozenset())


class _Raw:
    """The vocabulary as llguidance takes one."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = tuple(VOCABULARY.tokens)
    special_token_ids = tuple(VOCABULARY.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        return []


class Outlines:
    """Its guide, with an end token that no sequence has."""

    def __init__(self, index: Index, stops: Sequence[int]) -> None:
        self._index = index
        self._guide = Guide(index, 100)
        self._stops = frozenset(stops)

    def take(self, token: int) -> bool:
        if token in self._stops:
            return self.may_end()
        if token not in self._guide.get_tokens():
            return False
        self._guide.advance(token)
        return True

    def may_end(self) -> bool:
        return bool(self._index.is_final_state(self._guide.get_state()))

    def allowed(self) -> frozenset[int]:
        text = frozenset(self._guide.get_tokens()) - {VOCABULARY.width}
        return (text - self._stops) | (self._stops if self.may_end() else frozenset())


Make = Callable[[Sequence[int]], Matcher]
"""Makes a matcher at the start, from the stop tokens."""


@dataclass(frozen=True)
class Case:
    """A spec, and the same thing said to the plain library."""

    spec: GrammarSpec
    plain: Callable[[Grammar], Make]


def cases() -> list[Case]:
    """A grammar of each kind, and each backend."""
    return [
        Case(GrammarSpec.json_schema(_SCHEMA, backend="xgrammar"), _xgrammar_schema),
        Case(
            GrammarSpec.json_schema(
                _SCHEMA, max_whitespace=0, close_objects=True, backend="xgrammar"
            ),
            _xgrammar_schema,
        ),
        Case(GrammarSpec.json_schema(_SCHEMA), _llguidance_schema),
        Case(GrammarSpec.json_object(max_whitespace=2), _llguidance_schema),
        Case(GrammarSpec.regex(_REGEX), lambda _: _made(_xgrammar(b"").compile_regex(_REGEX))),
        Case(GrammarSpec.regex(_REGEX, backend="outlines"), _outlines_regex),
        Case(
            GrammarSpec.choice(["yes", "no", 'a"b', "\u00e9"]),
            lambda _: _made(
                _xgrammar(b"").compile_grammar('root ::= "yes" | "no" | "a\\"b" | "\u00e9"')
            ),
        ),
        Case(
            GrammarSpec.lark('start: "yes" (" " /[a-c]+/)*'),
            lambda _: lambda stops: LLGuidance('start: "yes" (" " /[a-c]+/)*', stops),
        ),
        Case(GrammarSpec.ebnf(_EBNF), lambda _: _made(_xgrammar(b"\xff").compile_grammar(_EBNF))),
        Case(
            GrammarSpec.structural_tag(_TAG),
            lambda _: _made(_xgrammar(b"").compile_structural_tag(_BOUNDED_TAG)),
        ),
    ]


_REGEX = "(ab|\u00e9)+[0-9]{1,4}"
_EBNF = f'root ::= item\nitem ::= ([a-z]* Token({THINK}))? "yes" ("," item)?'


def _made(compiled: xgrammar.CompiledGrammar) -> Make:
    return lambda stops: XGrammar(compiled, stops)


def _xgrammar_schema(grammar: Grammar) -> Make:
    assert grammar.backend == "xgrammar"
    plain, source = _xgrammar(b""), grammar.compiled_source
    if grammar.spec.max_whitespace == 0:
        separators = (",", ":")
        return _made(
            plain.compile_json_schema(
                source, any_whitespace=False, separators=separators, strict_mode=False
            )
        )
    white = grammar.spec.max_whitespace
    return _made(plain.compile_json_schema(source, max_whitespace_cnt=white, strict_mode=False))


def _llguidance_schema(grammar: Grammar) -> Make:
    assert grammar.backend == "llguidance"
    white = rf"[\x20\x0A\x0D\x09]{{1,{grammar.spec.max_whitespace}}}"
    source = grammar.compiled_source
    if not source.startswith("{"):  # in Lark already
        return lambda stops: LLGuidance(source, stops)
    schema = json.loads(source)
    schema["x-guidance"] = {"whitespace_flexible": True, "whitespace_pattern": white}
    return lambda stops: LLGuidance(f"start: %json {json.dumps(schema)}", stops)


def _outlines_regex(grammar: Grammar) -> Make:
    assert grammar.backend == "outlines"
    ids: dict[bytes, list[int]] = {}
    for token_id, token in enumerate(VOCABULARY.tokens):
        if token_id not in VOCABULARY.special_token_ids:
            ids.setdefault(token, []).append(token_id)
    index = Index(_REGEX, Tokens(VOCABULARY.width, ids))
    return lambda stops: Outlines(index, stops)


@cache
def _xgrammar(special: bytes) -> xgrammar.GrammarCompiler:
    """A compiler over the vocabulary, special tokens having just these bytes."""
    tokens = list(VOCABULARY.tokens)
    for token_id in VOCABULARY.special_token_ids:
        tokens[token_id] = special
    info = xgrammar.TokenizerInfo(tokens, vocab_size=VOCABULARY.width, stop_token_ids=[])
    return xgrammar.GrammarCompiler(info, max_threads=1)


@dataclass(frozen=True)
class Answer:
    """What a step has to answer: the outcome, the legal drafts, and 1 + drafts masks as ids."""

    outcome: Outcome
    legal_drafts: int
    masks: list[frozenset[int]]


def answer(
    make: Make,
    history: Sequence[int],
    drafts: Sequence[int] = (),
    *,
    stops: Sequence[int] = (EOS,),
    start: int = 0,
) -> Answer:
    """Replays a history in a new matcher, and then the drafts."""
    matcher = make(stops)
    stop_only = frozenset(stops)
    rest = [stop_only] * (1 + len(drafts))
    for token in history[start:]:
        if not _take(matcher, token):
            return Answer(Outcome.REJECTED, 0, rest)
        if token in stop_only:
            return Answer(Outcome.TERMINATED, 0, rest)
    free = len(history) < start
    outcome = Outcome.COMPLETE if not free and matcher.may_end() else Outcome.OK
    everything = frozenset(range(len(VOCABULARY.tokens)))
    masks = [everything if free else matcher.allowed()]
    legal, ended = 0, False
    for draft in drafts:
        position = len(history) + legal
        if ended or not 0 <= draft < len(VOCABULARY.tokens):
            break
        if position >= start and not _take(matcher, draft):
            break
        legal += 1
        ended = position >= start and draft in stop_only
        if ended:
            masks.append(stop_only)
        else:
            masks.append(everything if position + 1 < start else matcher.allowed())
    # A vocabulary that can't go on: fail closed, and say so.
    masks = [row or stop_only for row in masks]
    masks += [masks[-1]] * (len(drafts) - legal)
    return Answer(outcome, legal, masks)


def ids(row: torch.Tensor) -> frozenset[int]:
    """The ids that a mask of the service allows, bits past the vocabulary included."""
    bits = row.numpy().view("<u4")
    return frozenset(i for i in range(32 * len(bits)) if bits[i // 32] >> (i % 32) & 1)


def _take(matcher: Matcher, token: int) -> bool:
    return 0 <= token < len(VOCABULARY.tokens) and matcher.take(token)
