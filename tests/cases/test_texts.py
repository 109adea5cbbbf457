"""Regular expressions, EBNF, Lark and choices: reduced public reports."""

import contextlib
from collections.abc import Callable

import pytest

from engine_client import GrammarClient, GrammarSpec, Outcome, Refused
from tests.cases import Request
from tests.cases.test_schemas import BYTES, Case, accepts, assert_admits
from tests.support import allowed, toy

BACKENDS = ["xgrammar", "llguidance", "outlines"]
_OCTET = r"(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"

CASES = [
    Case(
        *("an empty alternative in a group", "mlc-ai/xgrammar#175"),
        GrammarSpec.regex(rf"({_OCTET}\.){{3}}{_OCTET}"),
        ["10.20.30.40", "255.255.255.255", "0.0.0.0"],
        ["256.1.1.1", "1.2.3", "1.2.3.4.5", "1.2.3.", "01.2.3.4"],
    ),
    Case(
        *("a comment's end is refused", "mlc-ai/xgrammar#400"),
        GrammarSpec.regex(r"\/\*(\*+[^*\/]|[^*])*\*+\/"),
        ["/*  */", "/**/", "/***/", "/* a*b */"],
        ["/* *", "/*", "/*/", "/* a"],
    ),
    Case(
        *("lazy quantifiers and empty groups", "mlc-ai/xgrammar#184"),
        GrammarSpec.regex("x*?()y+?"),
        ["y", "xy", "xxyy"],
        ["x", "", "yx"],
    ),
    Case(
        *("digits are ASCII", "(recalled)"),
        GrammarSpec.regex(r"\d{3}"),
        ["420", "007"],
        ["٤٢٠", "42", "4200", "12a"],
    ),
    Case(
        *("a letter beyond ASCII in a class", "mlc-ai/xgrammar#138"),
        GrammarSpec.ebnf("root ::= [ßé]"),
        ["ß", "é"],
        ["s", "è", "e", "éé", ""],
    ),
    Case(
        *("ranges of characters of 2, 3 and 4 bytes", "mlc-ai/xgrammar#491"),
        GrammarSpec.ebnf("root ::= [ж-щ]+ [一-龥] [😀-😿]"),
        ["жш中😃", "щ龥😿"],
        ["zd中😃", "жш中🌍", "中😃", "жш😃", "ж中中😃"],
    ),
    Case(
        *("a choice with a line break", "vllm-project/vllm#48115"),
        GrammarSpec.choice(["yes", "no\nthanks", "a\tb"]),
        ["yes", "no\nthanks", "a\tb"],
        ["no", "no\\nthanks", "nothanks", "a b", ""],
    ),
    Case(
        *("choices are put into a grammar as they are", "vllm-project/vllm#12632"),
        GrammarSpec.choice(['say "hi"', "a\\b", "[x]", "1.5", "a", "ab", "é{2}"]),
        ['say "hi"', "a\\b", "[x]", "1.5", "a", "ab", "é{2}"],
        ["a\\\\b", "x", "1x5", "abc", "éé", 'say "hi'],
    ),
    Case(
        *("a choice with control characters", "(recalled)"),
        GrammarSpec.choice(["a\x00b", "\x7f", "\x1b[0m"]),
        ["a\x00b", "\x7f", "\x1b[0m"],
        ["ab", "\x1b", "", "\\u007f"],
    ),
    Case(
        *("Lark goes to who speaks it", "vllm-project/vllm#16911"),
        GrammarSpec.lark('start: "SELECT " NAME ("," NAME)*\nNAME: /[a-z_]+/'),
        ["SELECT a", "SELECT a_b,c"],
        ["SELECT ", "SELECT a,", "select a", "SELECT 1"],
    ),
    Case(
        *("Lark may recurse", "ggml-org/llama.cpp#6492"),
        GrammarSpec.lark('start: "b" | start "a" | "(" start ")"'),
        ["b", "baa", "(ba)a"],
        ["a", "ab", "(b", ""],
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_text_is_admitted_or_not(client: GrammarClient, case: Case) -> None:
    assert_admits(client, case)


# The same texts whoever masks them: a choice is literal, a regex is matched as a whole.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if c.spec.type in ("regex", "choice")], ids=repr)
def test_all_backends_read_a_text_alike(client: GrammarClient, case: Case, backend: str) -> None:
    kind, source, choices = case.spec.type, case.spec.source, case.spec.choices
    spec = GrammarSpec(kind, source, choices, backend=backend)
    grammar = client.compile(spec, BYTES)
    assert grammar.backend == backend
    assert_admits(client, case._replace(spec=spec))


# Digits are ASCII's, as ECMAScript has it, with each backend.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("pattern", "good", "wide"),
    [
        (r"\d", "4", "٤"),
        (r"\w", "a", "é"),
        (r"[\d]", "4", "٤"),
        (r"\D", "a", "4"),
        (".", "a", "\n"),
    ],
)
def test_classes_are_those_of_ecmascript(
    client: GrammarClient, backend: str, pattern: str, good: str, wide: str
) -> None:
    grammar = client.compile(GrammarSpec.regex(pattern, backend=backend), BYTES)
    assert accepts(client, grammar, good)
    assert not accepts(client, grammar, wide)


# Nor does `auto` widen them, whoever takes what the first one refuses.
@pytest.mark.parametrize("pattern", [r"\d**", r"(\d)**x?"])
def test_digits_are_ascii_whoever_takes_them(client: GrammarClient, pattern: str) -> None:
    with contextlib.suppress(Refused):
        grammar = client.compile(GrammarSpec.regex(pattern), BYTES)
        assert accepts(client, grammar, "42")
        assert not accepts(client, grammar, "٤٢")


def test_a_comment_may_end_within_a_token(client: GrammarClient, new_id: Callable[[], str]) -> None:
    tokens = toy(["/*", " ", " */", "*", "/", "<eos>"], stop=[5])
    grammar = client.compile(GrammarSpec.regex(CASES[1].spec.source), tokens)
    for text in ([0, 1, 2], [4, 3, 1, 3, 4], [0, 3, 4], [0, 3, 3, 4]):
        request = Request(client, grammar, new_id())
        for token in text:
            assert token in request.allowed()
            request.accept(token)
        assert request.allowed() == [5]


# vllm-project/vllm#37642: after one regex, a second that is a little odd ends the engine
def test_an_odd_regex_beside_a_live_one(client: GrammarClient, new_id: Callable[[], str]) -> None:
    first = client.compile(GrammarSpec.regex("^(.*)$"), BYTES)
    live = Request(client, first, new_id())
    assert live.accept(*b"anything") is Outcome.COMPLETE
    before = live.allowed()
    odd = client.compile(GrammarSpec.regex("^(|.*)$"), BYTES)
    for text in ("", "a", "ab c"):
        assert accepts(client, odd, text)
    for pattern in ("(", "^(?=|.*)$", "a{3,1}"):
        with pytest.raises(Refused):
            client.compile(GrammarSpec.regex(pattern), BYTES)
    assert live.allowed() == before


# vllm-project/vllm#12632: a choice that begins another can end, and go on
def test_a_choice_may_begin_another(client: GrammarClient, new_id: Callable[[], str]) -> None:
    request = Request(client, client.compile(GrammarSpec.choice(["a", "ab"]), BYTES), new_id())
    assert request.accept(*b"a") is Outcome.COMPLETE
    assert request.allowed() == [ord("b"), 256]
    assert request.accept(*b"b") is Outcome.COMPLETE
    assert request.allowed() == [256]


# mlc-ai/xgrammar#183: look-ahead can't be expressed; it is an error that says so
@pytest.mark.parametrize("pattern", [r"^(?=.*\d)[a-z0-9]+$", r"(?<=a)b", r"(a)\1", r"(?!a)b"])
def test_what_no_mask_can_do_is_refused(client: GrammarClient, pattern: str) -> None:
    with pytest.raises(Refused) as caught:
        client.compile(GrammarSpec.regex(pattern), BYTES)
    assert caught.value.reason in ("SPEC_UNSUPPORTED", "SPEC_INVALID")
    assert "no look-around, no back references" in caught.value.message


# vllm-project/vllm#16911: a text in another dialect is refused with the name of the right one
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (GrammarSpec.ebnf('?start: "SELECT " NAME\n%import common.CNAME -> NAME'), "GBNF"),
        (GrammarSpec.ebnf('start: "a"'), "GBNF"),
        (GrammarSpec.ebnf("[a-z]+"), "GBNF"),
        (GrammarSpec.lark('root ::= "a" | "b"'), "Lark"),
        (GrammarSpec.lark('{"type":"object"}'), "Lark"),
        (GrammarSpec.regex("[a-z"), "regular expression"),
        (GrammarSpec.structural_tag({"type": "object", "properties": {}}), "structural tag"),
        (GrammarSpec.json_schema('root ::= "a"'), "JSON"),
    ],
)
def test_the_wrong_dialect(client: GrammarClient, spec: GrammarSpec, expected: str) -> None:
    with pytest.raises(Refused) as caught:
        client.compile(spec, BYTES)
    assert caught.value.reason == "SPEC_INVALID"
    assert expected in caught.value.message


def test_masks_of_a_regex_are_its_bytes(client: GrammarClient, new_id: Callable[[], str]) -> None:
    request = Request(client, client.compile(GrammarSpec.regex("é|è|x"), BYTES), new_id())
    (lead, acute), (_, grave) = "é".encode(), "è".encode()
    assert allowed(request.step().mask(0)) == sorted([lead, ord("x")])
    request.accept(lead)
    assert request.allowed() == sorted([acute, grave])
