"""The oracle: plain xgrammar, in this process, from nothing at each question.

It shares no code with the product: what is compiled how is written out here once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xgrammar

from engine_client import GrammarSpec, Outcome, Vocabulary
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


@dataclass(frozen=True)
class Case:
    """A spec, and the same thing said to plain xgrammar."""

    spec: GrammarSpec
    plain: xgrammar.CompiledGrammar


def cases() -> list[Case]:
    """A grammar of each kind."""
    plain, named = _compiler(special=b""), _compiler(special=b"\xff")
    regex = "(ab|\u00e9)+[0-9]{1,4}"
    ebnf = f'root ::= item\nitem ::= ([a-z]* Token({THINK}))? "yes" ("," item)?'
    return [
        Case(
            GrammarSpec.json_schema(_SCHEMA),
            plain.compile_json_schema(_SCHEMA, max_whitespace_cnt=8, strict_mode=False),
        ),
        Case(
            GrammarSpec.json_schema(_SCHEMA, max_whitespace=0, close_objects=True),
            plain.compile_json_schema(_SCHEMA, any_whitespace=False, separators=(",", ":")),
        ),
        Case(
            GrammarSpec.json_object(max_whitespace=2),
            plain.compile_json_schema({"type": "object"}, max_whitespace_cnt=2, strict_mode=False),
        ),
        Case(GrammarSpec.regex(regex), plain.compile_regex(regex)),
        Case(
            GrammarSpec.choice(["yes", "no", 'a"b', "\u00e9"]),
            plain.compile_grammar('root ::= "yes" | "no" | "a\\"b" | "\u00e9"'),
        ),
        Case(GrammarSpec.ebnf(ebnf), named.compile_grammar(ebnf)),
        Case(GrammarSpec.structural_tag(_TAG), plain.compile_structural_tag(_BOUNDED_TAG)),
    ]


def _compiler(special: bytes) -> xgrammar.GrammarCompiler:
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
    grammar: xgrammar.CompiledGrammar,
    history: Sequence[int],
    drafts: Sequence[int] = (),
    *,
    stops: Sequence[int] = (EOS,),
    start: int = 0,
    vocabulary: Vocabulary = VOCABULARY,
) -> Answer:
    """Replays a history in a new matcher, and then the drafts."""
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(stops))
    stop_only = frozenset(stops)
    for token in history[start:]:
        if matcher.is_terminated():
            break
        if not _take(matcher, token, vocabulary):
            return Answer(Outcome.REJECTED, 0, [stop_only] * (1 + len(drafts)))
    if matcher.is_terminated():
        return Answer(Outcome.TERMINATED, 0, [stop_only] * (1 + len(drafts)))
    free = len(history) < start
    outcome = Outcome.COMPLETE if matcher.is_completed() and not free else Outcome.OK
    everything = frozenset(range(len(vocabulary.tokens)))
    masks = [everything if free else mask(matcher, vocabulary)]
    legal = 0
    for draft in drafts:
        position = len(history) + legal
        if matcher.is_terminated() or not 0 <= draft < len(vocabulary.tokens):
            break
        if position >= start and not _take(matcher, draft, vocabulary):
            break
        legal += 1
        if matcher.is_terminated():
            masks.append(stop_only)
        else:
            masks.append(everything if position + 1 < start else mask(matcher, vocabulary))
    # A vocabulary that can't go on: fail closed, and say so.
    masks = [row or stop_only for row in masks]
    masks += [masks[-1]] * (len(drafts) - legal)
    return Answer(outcome, legal, masks)


def mask(matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary = VOCABULARY) -> frozenset[int]:
    """The ids that a matcher allows next."""
    words = xgrammar.allocate_token_bitmask(1, vocabulary.width)
    matcher.fill_next_token_bitmask(words)
    bits = words.numpy().view("<u4")[0]
    return frozenset(i for i in range(vocabulary.width) if bits[i // 32] >> (i % 32) & 1)


def ids(row: torch.Tensor) -> frozenset[int]:
    """The ids that a mask of the service allows, bits past the vocabulary included."""
    bits = row.numpy().view("<u4")
    return frozenset(i for i in range(32 * len(bits)) if bits[i // 32] >> (i % 32) & 1)


def _take(matcher: xgrammar.GrammarMatcher, token: int, vocabulary: Vocabulary) -> bool:
    return 0 <= token < len(vocabulary.tokens) and bool(matcher.accept_token(token))
