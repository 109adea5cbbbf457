"""Tokenizers as bytes: odd entries, special tokens, stop tokens from several places."""

from collections.abc import Callable, Iterator

import grpc
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from engine_client import GrammarClient, GrammarSpec, Outcome, Vocabulary
from engine_client.wire import tokenizers_pb2 as pb
from engine_client.wire.tokenizers_pb2_grpc import TokenizerServiceStub
from tests.cases import Request
from tests.support import ServiceProcess, allowed, running_service, toy

Begin = Callable[..., Request]


@pytest.fixture(scope="module")
def own_service() -> Iterator[ServiceProcess]:
    """One with room for all the vocabularies of these tests: the shared one has its limit."""
    with running_service("--max-tokenizers", "1000") as process:
        yield process


@pytest.fixture
def client(own_service: ServiceProcess) -> Iterator[GrammarClient]:
    with own_service.client() as connected:
        yield connected


@pytest.fixture
def begin(client: GrammarClient, new_id: Callable[[], str]) -> Begin:
    def make(spec: GrammarSpec, tokens: Vocabulary, **options: object) -> Request:
        return Request(client, client.compile(spec, tokens), new_id(), **options)

    return make


@pytest.fixture
def stub(own_service: ServiceProcess) -> Iterator[TokenizerServiceStub]:
    with grpc.insecure_channel(own_service.target) as channel:
        yield TokenizerServiceStub(channel)


# The pieces of emoji, and "A".
PIECES = toy(
    [b"\xf0\x9f", b"\x98", b"\x98\x80", b"\x80", b"A", b"\xf0\x9f\x98\x80", "<eos>"], stop=[6]
)


# ggml-org/llama.cpp#2501: a character in several tokens aborts the grammar
@pytest.mark.parametrize("text", [[0, 2, 6], [0, 1, 3, 6], [5, 6], [5, 0, 1, 3, 5, 6]])
def test_characters_may_span_tokens(begin: Begin, text: list[int]) -> None:
    request = begin(GrammarSpec.ebnf("root ::= [😀-🙏]+"), PIECES)
    for token in text:
        assert token in request.allowed()
        request.accept(token)
    assert request.step().outcomes[0] is Outcome.TERMINATED


@pytest.mark.parametrize(
    ("text", "following"), [([], [0, 5]), ([0], [1, 2]), ([5], [0, 5, 6]), ([0, 2], [0, 5, 6])]
)
def test_after_a_lead_byte_comes_its_continuation(
    begin: Begin, text: list[int], following: list[int]
) -> None:
    request = begin(GrammarSpec.ebnf("root ::= [😀-🙏]+"), PIECES)
    request.accept(*text)
    assert request.allowed() == following
    for token in {*range(7)} - {*following}:
        wrong = begin(GrammarSpec.ebnf("root ::= [😀-🙏]+"), PIECES)
        assert wrong.accept(*text, token) is Outcome.REJECTED


# vllm-project/vllm#52146: the second end token stays legal inside strings
@pytest.mark.parametrize(
    ("of_tokenizer", "of_request"), [([2, 3], ()), ([2], (3,)), ([3], (2,)), ([], (2, 3))]
)
def test_every_stop_token_waits_for_the_end(
    begin: Begin, of_tokenizer: list[int], of_request: tuple[int, ...]
) -> None:
    tokens = toy(['"', "a", "<end1>", "<end2>"], stop=of_tokenizer)
    request = begin(GrammarSpec.json_schema({"type": "string"}), tokens, stop_token_ids=of_request)
    request.accept(0, 1)
    assert request.allowed() == [0, 1]
    assert request.accept(0) is Outcome.COMPLETE
    assert request.allowed() == [2, 3]
    for stop in (2, 3):
        assert request.accept(stop) is Outcome.TERMINATED
        assert allowed(request.step().mask(0)) == [2, 3]
        request.rewind(1)


# sgl-project/sglang#31533: the tokenizer's end token is missing from the model's configuration
@pytest.mark.parametrize("stop", [1, 2])
def test_stop_tokens_are_a_union(begin: Begin, stop: int) -> None:
    tokens = toy(["ok", "<text_end>", "<im_end>"], stop=[2], special=[1])
    request = begin(GrammarSpec.choice(["ok"]), tokens, stop_token_ids=(1,))
    assert request.allowed() == [0]
    request.accept(0)
    assert request.allowed() == [1, 2]
    assert request.accept(stop) is Outcome.TERMINATED


# Bits past the vocabulary are 0, and what the mask allows can be taken: so a stop token that no
# token stands behind is refused, not promised.
def test_a_stop_token_without_a_token_is_never_promised(begin: Begin) -> None:
    tokens = toy(["ok", "<eos>"], stop=[1], width=40)
    request = begin(GrammarSpec.choice(["ok"]), tokens, stop_token_ids=(35,))
    request.tokens = [0]
    result = request.step(0)
    assert all(token < 2 for token in allowed(result.mask(0)))


# mlc-ai/xgrammar#701: a stop token that the grammar names as its last symbol is never accepted
def test_a_stop_token_may_be_the_last_symbol(begin: Begin) -> None:
    tokens = toy(["x", "<return>"], stop=[1])
    request = begin(GrammarSpec.ebnf('root ::= "x" Token(1)'), tokens)
    assert request.chain(0, 1) == (2, [[0], [1], [1]])
    request.accept(0)
    assert request.allowed() == [1]
    assert request.accept(1) is Outcome.TERMINATED


# mlc-ai/xgrammar#237: the model's vocabulary is smaller than the tokenizer's
def test_a_model_narrower_than_its_tokenizer(begin: Begin) -> None:
    tokens = toy(["a", "b", "<eos>", "<image>"], stop=[2], width=3)
    for spec in (GrammarSpec.choice(["a"]), GrammarSpec.regex(".*")):
        request = begin(spec, tokens)
        result = request.step()
        assert result.masks.shape == (1, 1)
        assert 3 not in allowed(result.mask(0))
        request.tokens = [3]
        result = request.step(0)
        assert result.outcomes[0] is Outcome.REJECTED
        assert result.notes[0].reason == "TOKEN_OUT_OF_RANGE"
        assert "token 3" in result.notes[0].message


@pytest.mark.parametrize("width", [31, 32, 33, 64, 65])
def test_a_model_wider_than_its_tokenizer(begin: Begin, width: int) -> None:
    tokens = toy(["a", "b", "<eos>"], stop=[2], width=width)
    request = begin(GrammarSpec.regex("[ab]*"), tokens)
    result = request.step(drafts=(0, 1))
    assert result.masks.shape == (3, -(-width // 32))
    assert [allowed(mask) for mask in result.masks] == [[0, 1, 2]] * 3
    request.tokens = [width - 1]
    assert request.step(0).notes[0].reason == "TOKEN_OUT_OF_RANGE"


# dottxt-ai/outlines#820: an entry that is part of a character, and the compile fails
def test_entries_that_are_no_text(begin: Begin) -> None:
    tokens = toy(["yes", "no", " \ufffd", b"\xe4", b"", "<eos>"], stop=[5])
    assert begin(GrammarSpec.choice(["yes", "no"]), tokens).allowed() == [0, 1]
    # "ä" begins with another byte: no token goes on, and that is said, not shown as a mask of 0.
    result = begin(GrammarSpec.choice(["ä"]), tokens).step()
    assert result.outcomes[0] is Outcome.FAILED
    assert result.notes[0].reason == "DEAD_END"
    assert allowed(result.mask(0)) == [5]


# mlc-ai/xgrammar#484: the wrong family, and tokens with a leading space are masked out
def test_a_leading_space_is_a_space(begin: Begin) -> None:
    words = {'{"k":': 0, 'Ġ"': 1, 'v"}': 2, "<eos>": 3}
    backend = Tokenizer(WordLevel(words, unk_token="<eos>"))
    backend.decoder = ByteLevel()
    backend.add_special_tokens(["<eos>"])
    tokens = Vocabulary.from_huggingface(backend, stop_token_ids=[3])
    assert tokens.tokens[1] == b' "'
    request = begin(GrammarSpec.json_schema({"type": "object"}), tokens)
    request.accept(0)
    assert 1 in request.allowed()
    assert request.accept(1, 2) is Outcome.COMPLETE


# mlc-ai/xgrammar#879: a NUL token is lost on the way through a file, and masks crash
def test_a_nul_token_survives_every_way(begin: Begin, stub: TokenizerServiceStub) -> None:
    tokens = toy([b"\0", "a", "<eos>"], stop=[2], width=4)
    # To the service, into the compile child, and back as an artifact.
    assert begin(GrammarSpec.ebnf("root ::= Token(1)"), tokens).allowed() == [1]
    assert begin(GrammarSpec.ebnf("root ::= Token(0)"), tokens).allowed() == [0]
    assert begin(GrammarSpec.choice(["\0a"]), tokens).allowed() == [0]
    request = pb.GetTokenizerRequest(tokenizer_id=tokens.id)
    held = stub.GetTokenizer(request, timeout=20).tokenizer
    assert (held.vocab_size, held.width, held.empty_count) == (3, 4, 0)


# guidance-ai/guidance#1137: ordinary text rules produce special tokens
def test_text_never_matches_a_special_token(begin: Begin) -> None:
    tokens = toy(['"', "<|eot|>", "x", "<eos>"], stop=[3], special=[1])
    for spec in (
        GrammarSpec.json_schema({"type": "string"}),
        GrammarSpec.ebnf('root ::= "\\"" [^"]* "\\""'),
        GrammarSpec.regex('".*"'),
        GrammarSpec.choice(['"<|eot|>"', '"x"']),
    ):
        request = begin(spec, tokens)
        request.accept(0)
        following = request.allowed()
        assert 2 in following
        assert 1 not in following
        assert 3 not in following
        assert request.accept(1) is Outcome.REJECTED


# huggingface/transformers.js#1758: a blanket ban makes the model's own tool format impossible
def test_a_special_token_may_be_named(begin: Begin) -> None:
    tokens = toy(["<|tool|>", "x", "<|/tool|>", "<eos>"], stop=[3], special=[0, 2])
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": {"type": "token", "token": "<|tool|>"},
            "content": {"type": "regex", "pattern": "x"},
            "end": {"type": "token", "token": "<|/tool|>"},
        },
    }
    by_id, by_name = GrammarSpec.ebnf('root ::= Token(0) "x" Token(2)'), tag
    for spec in (by_id, GrammarSpec.structural_tag(by_name)):
        request = begin(spec, tokens)
        assert request.chain(0, 1, 2, 3) == (4, [[0], [1], [2], [3], [3]])


# guidance-ai/llguidance#174: free text, then a special token by id, and the matcher panics
def test_free_text_until_a_special_token(begin: Begin) -> None:
    tokens = toy(["\n", "abc", "</think>", "<eos>"], stop=[3], special=[2])
    request = begin(GrammarSpec.ebnf('root ::= "\\n" [a-z]* Token(2)'), tokens)
    request.accept(0, 1)
    assert request.allowed() == [1, 2]
    assert request.accept(2) is Outcome.COMPLETE
    assert request.allowed() == [3]
