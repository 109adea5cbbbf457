"""An expression has the same texts with each backend, and they are those that it should have."""

import json
import random
import re
from typing import Any

import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_client import GrammarSpec
from engine_client.in_process import compile_spec
from grammar_service.grammars.regex import Irregular, Malformed, in_json, read, write
from grammar_service.grammars.schema import forms
from tests.cases.test_schemas import BYTES
from tests.grammars.regex.expressions import Masks, expressions, texts
from tests.support import allowed

BACKENDS = ["xgrammar", "llguidance", "outlines"]


@given(pattern=expressions, some=st.lists(texts, min_size=3, max_size=8))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_all_backends_agree_with_python(pattern: str, some: list[str]) -> None:
    python = re.compile(pattern, re.ASCII)
    expected = [python.fullmatch(text) is not None for text in some]
    for backend in BACKENDS:
        masks = Masks(pattern, backend)
        assert [masks.accepts(text) for text in some] == expected, backend


@given(pattern=expressions, some=st.lists(texts, min_size=3, max_size=8))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_written_is_what_was_read(pattern: str, some: list[str]) -> None:
    for search in (False, True):
        found = re.compile(pattern, re.ASCII)
        written = re.compile(write(read(pattern, search)))
        spelled = re.compile(write(in_json(read(pattern, search))))
        for text in some:
            # Before a last line feed is Python's `$` too.
            if search and text.endswith("\n"):
                continue
            expected = (found.search if search else found.fullmatch)(text) is not None
            assert (written.fullmatch(text) is not None) == expected
            assert (spelled.fullmatch(_spelled(text)) is not None) == expected
            assert read(write(read(pattern, search))) == read(write(read(pattern, search)))


def _spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@given(pattern=expressions, seed=st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_xgrammar_admits_is_json_and_matches(pattern: str, seed: int) -> None:
    schema: Any
    (schema,) = forms({"type": "string", "pattern": pattern}, "xgrammar")
    compiled = compile_spec(GrammarSpec.json_schema(schema), BYTES)
    rng, mask = random.Random(seed), torch.zeros((1, 9), dtype=torch.int32)
    for _ in range(5):
        matcher, text = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[256]), b""
        while len(text) < 30:
            matcher.fill_next_token_bitmask(mask)
            choices = [token for token in allowed(mask[0]) if token <= 256]
            if 256 in choices:
                value = json.loads(text)
                assert re.search(pattern, value, re.ASCII)
                break
            token = rng.choice([*choices, *(t for t in choices if t in b'"\\na1')])
            assert matcher.accept_token(token)
            text += bytes([token])


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (r"\s", ["\t", "\v", "\xa0", "\u2028", "\u3000", "\ufeff"], ["\x1c", "\x85", "\u200b"]),
        (".", ["a", "\x85", "😀"], ["\n", "\r", "\u2028", "\u2029", "ab"]),
        (r"\w+", ["aZ_9"], ["é", "\u017f", "٤"]),
        (r"[^]", ["\n", "😀"], ["", "aa"]),
        (r"a[]|b", ["b"], ["a", ""]),
        (r"\cA\0\x41\u0042\u{43}\u{1F600}\uD83D\uDE00", ["\x01\x00ABC😀😀"], ["ABC"]),
        (r"[\b\-\]\\^]+", ["\b-]\\^"], ["b"]),
        (r"[\w-.]", ["a", "-", "."], ["/", ","]),
        (r"{[a-z]}]\_\/\é", ["{a}]_/é"], ["a"]),
        (r"(?<year>[0-9]{2})", ["42"], ["4"]),
        (r"a{2,}?b{0}c{1}", ["aac", "aaac"], ["ac", "aabc"]),
        (r"(?i:straße|K)x", ["STRAßEx", "kx", "\u212ax"], ["kX", "strassex"]),
        (r"^(?i)a(b(?-i)c)d|e$", ["aBcD", "E"], ["ABCD", "aBCd"]),
        (r"(?i:[^k])", ["a"], ["k", "K", "\u212a"]),
        (r"(?s:.)(?-s:.)", ["\na"], ["a\n"]),
        (r"\p{Lu}\P{L}\p{Letter}", ["É1é", "Ж-я"], ["é1é", "EEé"]),
        (r"(^a|b)(c|d$)", ["ac", "bd"], ["a", "c"]),
        (r"^^a$$|^$", ["a", ""], ["aa"]),
        ("[\ud7ff-\ue000]", ["\ud7ff", "\ue000"], ["a"]),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_dialect(backend: str, pattern: str, taken: list[str], refused: list[str]) -> None:
    masks = Masks(pattern, backend)
    assert [text for text in taken if not masks.accepts(text)] == []
    assert [text for text in refused if masks.accepts(text)] == []


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("(^|,)a($|,)", ["a", "b,a", "a,b", "b,a,c"], ["ba", "ab", ""]),
        ("^a|b$", ["ax", "xb", "a"], ["xa", "bx"]),
        ("^$|^(x(y$)?)", ["", "xz", "xy"], ["zx"]),
        ("a(?:$)?", ["xay"], ["b"]),
        ("", ["", "a"], []),
    ],
)
def test_anchors_at_edges(pattern: str, matching: list[str], others: list[str]) -> None:
    written = re.compile(write(read(pattern, search=True)))
    assert [text for text in matching if not written.fullmatch(text)] == []
    assert [text for text in others if written.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("ab(?=c)", "look-ahead, (?=…), at position 2"),
        ("(?<!a)b", "look-behind, (?<!…), at position 0"),
        (r"(a)\1", r"a back reference, \1, at position 3"),
        (r"(?<n>a)\k<n>", r"a back reference, \k, at position 7"),
        (r"\bfoo", r"a word border, \b, at position 0"),
        ("a^b", "^ at position 1 isn't at an edge"),
        ("a$b", "$ at position 1 isn't at an edge"),
        ("(^a)+", "^ at position 1 isn't at an edge"),
        ("(" * 200 + ")" * 200, "100 groups in one another"),
    ],
)
def test_what_is_not_regular_is_named(pattern: str, message: str) -> None:
    with pytest.raises(Irregular, match=re.escape(message)):
        read(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(b", "isn't closed; add a ), or escape its ( (position 1)"),
        ("ab)", "closes no group; escape it (position 2)"),
        ("[a-z", "add a ], or escape its [ (position 0)"),
        ("*a", "nothing is before *; escape it (position 0)"),
        ("a|+", "nothing is before +; escape it (position 2)"),
        ("a**", "a repetition of a repetition; put the inner one into (?:…) (position 2)"),
        ("a++", "a repetition of a repetition"),
        ("a{3,1}", "{3,1} has its bounds in the wrong order (position 1)"),
        ("a{,3}", "write {0,…} (position 1)"),
        ("a{1000000000000}", "so many repetitions can't be had (position 1)"),
        ("^*", "an anchor can't be repeated (position 1)"),
        ("[z-a]", "turn it round (position 1)"),
        ("[[:alpha:]]", "write the ranges: [A-Za-z] (position 1)"),
        (r"\Astart\Z", r"\A is no escape; write ^ (position 0)"),
        (r"a\y", r"\y is no escape; write it otherwise (position 1)"),
        ("a\\", "is no escape"),
        (r"\p{Script=Greek}", r"\p{Script=Greek} isn't to be had"),
        (r"\u{110000}", "there is no character of that number (position 0)"),
        ("(?P<n>a)", "a group is named (?<name>…) (position 0)"),
        ("(?m:^a)", "of the modifiers there are i and s"),
        ("(?>a)", "this kind of group isn't known"),
    ],
)
def test_what_is_no_expression_says_what_to_do(pattern: str, message: str) -> None:
    with pytest.raises(Malformed, match=re.escape(message)):
        read(pattern)
