"""The three backends, each in this process, against plain truth: a list of all legal texts."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine_client import GrammarSpec, Vocabulary
from grammar_service.backends import NAMES, Backend, create
from grammar_service.errors import Invalid
from grammar_service.grammars.plan import plan
from grammar_service.grammars.schema import Limits
from tests.support import allowed, toy

TOKENS = toy(
    ["a", "b", "c", "ab", "bb", "bc", "abc", "bbc", "ca", "<pad>", "", "é", "<end>", "<eos>"],
    stop=[13],
    special=[9, 12],
    width=70,
)
A, B, C, AB, BB, BC, ABC, BBC, CA, PAD, EMPTY, ACUTE, END, EOS = range(14)
TEXTS: list[tuple[GrammarSpec, Callable[[bytes], bool], Callable[[bytes], bool]]] = [
    (
        GrammarSpec.regex("ab*c"),
        lambda text: text[:1] == b"a" and text[-1:] == b"c" and set(text[1:-1]) <= {98},
        lambda text: text == b"" or (text[:1] == b"a" and set(text[1:].removesuffix(b"c")) <= {98}),
    ),
    *(
        (
            GrammarSpec.choice(choices),
            lambda text, choices=choices: text.decode() in choices,
            lambda text, choices=choices: any(c.startswith(text.decode()) for c in choices),
        )
        for choices in (["abc", "abbc", "cab", "é"], ["a", "ab", "abbb"])
    ),
]
"""Specs; whether a text is whole, and whether it begins one."""


@pytest.fixture(scope="module", params=NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = create(request.param, 1)
    made.prepare(TOKENS)
    assert made.name == request.param
    assert made.version
    return made


def compiled(backend: Backend, spec: GrammarSpec, tokens: Vocabulary = TOKENS) -> Any:
    """A grammar, by way of its artifact."""
    artifact = backend.compile(spec, tokens)
    assert isinstance(artifact, bytes)
    grammar = backend.load(artifact, spec, tokens)
    assert backend.memory_bytes(grammar) > 0
    return grammar


def mask(backend: Backend, matcher: Any, tokens: Vocabulary = TOKENS) -> list[int]:
    """What a matcher allows. Rows beside its own are left alone."""
    found = []
    for filling in (0, -1):
        masks = torch.full((3, (tokens.width + 31) // 32), filling, dtype=torch.int32)
        backend.fill([matcher], masks, [1])
        assert {*masks[0].tolist(), *masks[2].tolist()} == {filling}
        # Bits past the tokens are the service's to clear.
        found.append([token for token in allowed(masks[1]) if token < len(tokens.tokens)])
    assert found[0] == found[1]
    return found[0]


def take(backend: Backend, matcher: Any, *tokens: int) -> list[bool]:
    """What becomes of tokens, one after the other."""
    return [backend.accept([matcher], [token])[0] for token in tokens]


def truth(begins: Callable[[bytes], bool], text: bytes, whole: bool, stops: list[int]) -> list[int]:
    """The tokens that may follow a text."""
    found = [*stops] if whole else []
    for token, content in enumerate(TOKENS.tokens):
        if token in TOKENS.special_token_ids or token in stops or not content:
            continue
        try:
            if begins(text + content):
                found.append(token)
        except UnicodeDecodeError:
            continue
    return sorted({*found})


@pytest.mark.parametrize("number", range(len(TEXTS)))
@pytest.mark.parametrize("stops", [[EOS], [END, EOS], [EOS, ABC], [BB, EOS]])
def test_random_walks(backend: Backend, number: int, stops: list[int]) -> None:
    spec, is_whole, begins = TEXTS[number]
    grammar = compiled(backend, spec)
    if backend.name == "xgrammar" and ABC in stops:
        # There a stop token that is text too is legal where its text completes the grammar: it
        # ends the sequence as it would from a grammar that names it.
        stops = [EOS]
    rng = random.Random(f"{number} {stops}")
    for _ in range(12):
        matcher, taken = backend.matcher(grammar, stops), list[int]()
        for _ in range(12):
            text = b"".join(TOKENS.tokens[token] for token in taken)
            whole = is_whole(text)
            may_follow = truth(begins, text, whole, stops)
            assert backend.completed([matcher]) == [whole], text
            assert not backend.terminated(matcher)
            assert mask(backend, matcher) == may_follow, text
            forks = [backend.fork(matcher) for _ in TOKENS.tokens]
            answers = backend.accept(forks, range(len(forks)))
            assert [token for token, answer in enumerate(answers) if answer] == may_follow, text
            for token, fork in enumerate(forks):
                assert backend.terminated(fork) == (token in stops and token in may_follow)
            if taken and rng.random() < 0.3:
                count = rng.randint(1, len(taken))
                backend.rollback([matcher], [count])
                del taken[-count:]
                continue
            onward = [token for token in may_follow if token not in stops]
            if not onward:
                break
            taken.append(rng.choice(onward))
            assert take(backend, matcher, taken[-1]) == [True]


def test_what_is_refused_changes_nothing(backend: Backend) -> None:
    matcher = backend.matcher(compiled(backend, GrammarSpec.regex("ab*c")), [EOS])
    for token in (C, EOS, PAD, ACUTE, END, CA):
        assert take(backend, matcher, token) == [False]
    assert take(backend, matcher, A, A, BB, EOS, CA) == [True, False, True, False, False]
    assert mask(backend, matcher) == [B, C, BB, BC, BBC]
    backend.rollback([matcher], [2])
    assert mask(backend, matcher) == [A, AB, ABC]


def test_forks_go_their_own_ways(backend: Backend) -> None:
    first = backend.matcher(compiled(backend, GrammarSpec.regex("ab*c")), [EOS])
    take(backend, first, A, B)
    second = backend.fork(first)
    assert take(backend, second, C, EOS) == [True, True]
    third = backend.fork(second)
    assert [backend.terminated(m) for m in (first, second, third)] == [False, True, True]
    assert mask(backend, first) == [B, C, BB, BC, BBC]
    # A fork can be taken back past the point where it was made.
    backend.rollback([second, third], [2, 4])
    assert not backend.terminated(second)
    assert mask(backend, second) == [B, C, BB, BC, BBC]
    assert mask(backend, third) == [A, AB, ABC]
    assert backend.completed([first, second, third]) == [False] * 3


def test_the_end_can_be_taken_back(backend: Backend) -> None:
    matcher = backend.matcher(compiled(backend, GrammarSpec.regex("ab*c")), [END, EOS])
    for stop in (END, EOS):
        assert take(backend, matcher, ABC, stop) == [True, True]
        assert backend.terminated(matcher)
        assert take(backend, matcher, A, stop, B) == [False] * 3
        backend.rollback([matcher], [1])
        assert not backend.terminated(matcher)
        assert backend.completed([matcher]) == [True]
        assert mask(backend, matcher) == [END, EOS]
        backend.rollback([matcher], [1])
        assert mask(backend, matcher) == [A, AB, ABC]


def test_long_histories_can_be_taken_back(backend: Backend) -> None:
    matcher = backend.matcher(compiled(backend, GrammarSpec.regex("ab*c")), [EOS])
    assert all(take(backend, matcher, A, *[BB] * 500, BC))
    backend.rollback([matcher], [502])
    assert mask(backend, matcher) == [A, AB, ABC]
    assert backend.matcher_bytes(1000) > backend.matcher_bytes(10) > 0


def test_batches(backend: Backend) -> None:
    grammars = [compiled(backend, spec) for spec, _, _ in TEXTS[:2]]
    matchers = [backend.matcher(grammars[i % 2], [EOS, END][: 1 + i % 3]) for i in range(20)]
    tokens = [[AB, CA][i % 2] if i < 15 else PAD for i in range(20)]
    assert backend.accept(matchers, tokens) == [i < 15 for i in range(20)]
    rows = [(7 * i) % 20 for i in range(20)]  # in no order
    masks = torch.zeros((20, 3), dtype=torch.int32)
    backend.fill(matchers, masks, rows)
    for matcher, row in zip(matchers, rows, strict=True):
        assert [t for t in allowed(masks[row]) if t < 14] == mask(backend, matcher)
    backend.rollback(matchers[:15], [1] * 15)
    assert mask(backend, matchers[2]) == [A, AB, ABC]
    assert backend.completed(matchers) == [False] * 20
    assert backend.accept([], []) == []
    backend.rollback([], [])


def test_grammars_of_several_vocabularies(backend: Backend) -> None:
    other = toy(["c", "b", "a", "<eos>"], stop=[3])
    for tokens, first, second in (
        (other, [2], [0, 1]),
        (TOKENS, [A, AB, ABC], [B, C, BB, BC, BBC]),
    ):
        matcher = backend.matcher(
            compiled(backend, GrammarSpec.regex("ab*c"), tokens), tokens.stop_token_ids
        )
        assert mask(backend, matcher, tokens) == first
        take(backend, matcher, first[0])
        assert mask(backend, matcher, tokens) == second


@pytest.mark.parametrize("pattern", ["(", "a**b(", "[z-a]", "a{2,1}", r"(a)\1", "(?=a)"])
def test_what_is_no_expression_is_invalid(backend: Backend, pattern: str) -> None:
    with pytest.raises(Invalid) as caught:
        backend.compile(GrammarSpec.regex(pattern), TOKENS)
    assert caught.value.reason in ("SPEC_INVALID", "SPEC_UNSUPPORTED")
    assert caught.value.message
    assert compiled(backend, GrammarSpec.regex("a"))


def test_special_tokens_have_no_text(backend: Backend) -> None:
    grammar = compiled(backend, GrammarSpec.regex("(.|\\n)*"))
    matcher = backend.matcher(grammar, [EOS])
    legal = [A, B, C, AB, BB, BC, ABC, BBC, CA, ACUTE, EOS]
    assert mask(backend, matcher) == legal
    assert take(backend, backend.fork(matcher), PAD) == [False]
    assert take(backend, backend.fork(matcher), END) == [False]
    assert take(backend, backend.fork(matcher), EMPTY) == [False]
    # Not even where the text is that of a special token.
    matcher = backend.matcher(compiled(backend, GrammarSpec.choice(["<pad>", "<eos>", "a"])), [EOS])
    assert mask(backend, matcher) == [A]


# A sequence has stop tokens where its tokenizer has none.
@pytest.mark.parametrize("stop", [1, 3])
def test_a_special_token_is_no_stop_token(backend: Backend, stop: int) -> None:
    tokens = toy(["a", "b", "<pad>", "<end>"], stop=[], special=[2, 3])
    matcher = backend.matcher(compiled(backend, GrammarSpec.regex("a"), tokens), [stop])
    assert mask(backend, matcher, tokens) == [0]
    take(backend, matcher, 0)
    assert mask(backend, matcher, tokens) == [stop]
    assert take(backend, matcher, 2, stop) == [False, True]


def test_a_stop_token_beyond_the_first_words(backend: Backend) -> None:
    wide = toy([*"ab", *[f"<{i}>" for i in range(94)]], stop=[95], special=range(2, 96))
    matcher = backend.matcher(compiled(backend, GrammarSpec.choice(["ab"]), wide), [31, 32, 95])
    assert mask(backend, matcher, wide) == [0]
    assert take(backend, matcher, 0, 32, 1) == [True, False, True]
    assert mask(backend, matcher, wide) == [31, 32, 95]
    assert take(backend, matcher, 32) == [True]


@pytest.fixture
def llguidance() -> Backend:
    return create("llguidance", 1)


# Where bytes are forced, the library would allow one way to write them only.
@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.choice(["abbc"]),
        GrammarSpec.regex("abbc"),
        GrammarSpec.lark('start: "abbc"'),
        GrammarSpec.lark("start: A\nA: /abbc/"),
    ],
)
def test_llguidance_does_not_force(llguidance: Backend, spec: GrammarSpec) -> None:
    matcher = llguidance.matcher(compiled(llguidance, spec), [EOS])
    assert mask(llguidance, matcher) == [A, AB]
    take(llguidance, matcher, A)
    assert mask(llguidance, matcher) == [B, BB, BBC]


@pytest.mark.parametrize("spec", [GrammarSpec.regex("ab*c"), GrammarSpec.choice(["abc", "abbc"])])
def test_outlines_refuses_a_table_cut_short(spec: GrammarSpec) -> None:
    outlines = create("outlines", 1)
    artifact = outlines.compile(spec, TOKENS)
    for length in {*range(0, len(artifact), 4), len(artifact) - 1} - {len(artifact)}:
        with pytest.raises(Exception):  # noqa: B017, PT011 (any; what it must not do is load)
            outlines.load(artifact[:length], spec, TOKENS)
    with pytest.raises(ValueError, match="cut short"):
        outlines.load(artifact[:-4], spec, TOKENS)
    with pytest.raises(ValueError, match="cut short"):
        outlines.load(artifact + b"\0" * 4, spec, TOKENS)
    assert outlines.load(artifact, spec, TOKENS)


# For outlines-core, a regular expression of no other text is none.
@pytest.mark.parametrize("pattern", ["^$", "()", "(?:){3}", "a{0}", "(|)"])
def test_only_the_empty_text(backend: Backend, pattern: str) -> None:
    (attempt,) = plan(GrammarSpec.regex(pattern, backend=backend.name), Limits()).attempts
    matcher = backend.matcher(compiled(backend, attempt.specs[0]), [EOS])
    assert mask(backend, matcher) == [EOS]
    assert backend.completed([matcher]) == [True]
    assert take(backend, matcher, A, EOS) == [False, True]
    assert backend.terminated(matcher)


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="nobody"):
        create("nobody", 1)


def _speaks(backend: Backend, spec: GrammarSpec) -> bool:
    try:
        backend.compile(spec, TOKENS)
    except Invalid:
        return False
    return True


@pytest.mark.parametrize(
    ("spec", "speakers"),
    [
        (GrammarSpec.ebnf('root ::= "a"'), ["xgrammar"]),
        (GrammarSpec.lark('start: "a"'), ["llguidance"]),
    ],
)
def test_who_speaks_what(backend: Backend, spec: GrammarSpec, speakers: Sequence[str]) -> None:
    assert _speaks(backend, spec) == (backend.name in speakers)
