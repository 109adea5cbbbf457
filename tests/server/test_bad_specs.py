"""Specs and tokenizers that are refused: with a reason, and the next call works."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine_client import GrammarClient, GrammarSpec
from engine_client.wire import grammars_pb2 as grammars
from engine_client.wire import sequences_pb2 as sequences
from engine_client.wire import tokenizers_pb2 as tokenizers
from tests.server import SECONDS, TOKENS, Stubs, refused, stubs_of
from tests.support import ServiceProcess


@pytest.fixture
def stubs(service: ServiceProcess) -> Iterator[Stubs]:
    with stubs_of(service.target) as stubs:
        yield stubs


# What can be wrong with a spec: its fields, the code, the reason and what the message says.
SCHEMA, EBNF, CHOICE = (
    grammars.GRAMMAR_TYPE_JSON_SCHEMA,
    grammars.GRAMMAR_TYPE_EBNF,
    grammars.GRAMMAR_TYPE_CHOICE,
)
BAD_SPECS: list[tuple[str, int, dict[str, Any], str, str]] = [
    ("10 MB", EBNF, {"source": "x" * 10_000_000}, "SPEC_TOO_LARGE", "max_spec_bytes"),
    ("10 MB choices", CHOICE, {"choices": ["x" * 5_000_000] * 2}, "SPEC_TOO_LARGE", "10000000"),
    ("deep", SCHEMA, {"source": '{"not":' * 9999 + "1" + "}" * 9999}, "SPEC_TOO_LARGE", "deep"),
    ("no JSON", SCHEMA, {"source": "{type: object}"}, "SPEC_INVALID", "no JSON"),
    ("half JSON", SCHEMA, {"source": '{"type": '}, "SPEC_INVALID", "no JSON"),
    ("NaN", SCHEMA, {"source": '{"const": NaN}'}, "SPEC_INVALID", "NaN"),
    ("a list", SCHEMA, {"source": "[1]"}, "SPEC_INVALID", "json_schema is a JSON object"),
    ("no source", SCHEMA, {}, "SPEC_INVALID", "takes a source"),
    ("no choices", CHOICE, {}, "SPEC_INVALID", "takes choices"),
    ("an empty choice", CHOICE, {"choices": ["a", ""]}, "SPEC_INVALID", "choice is empty"),
    ("a choice as source", CHOICE, {"source": "a"}, "SPEC_INVALID", "takes choices"),
    ("no rule", EBNF, {"source": "root ::= nowhere"}, "SPEC_INVALID", "nowhere"),
    ("no type", 0, {"source": "a"}, "SPEC_UNSUPPORTED", "type 0"),
    ("a new type", 99, {"source": "a"}, "SPEC_UNSUPPORTED", "type 99"),
    ("a new backend", EBNF, {"source": "a", "backend": 99}, "SPEC_UNSUPPORTED", "backend 99"),
    (
        *("white space", SCHEMA),
        {"source": "{}", "options": grammars.GrammarOptions(max_whitespace=1001)},
        *("SPEC_INVALID", "max_whitespace is 0 to 1000"),
    ),
    (
        *("what isn't enforced", SCHEMA, {"source": '{"items":{"uniqueItems":true}}'}),
        *("SPEC_UNENFORCED", "uniqueItems at /items"),
    ),
    # No meta-schema lets these pass, whatever stands where a schema belongs.
    *(
        (source, SCHEMA, {"source": source}, "SPEC_INVALID", "")
        for source in (
            *('{"required":true}', '{"properties":5,"required":["a"]}', '{"oneOf":5}'),
            *('{"enum":5}', '{"type":{}}', '{"type":[[]]}', '{"patternProperties":5}'),
            *('{"required":[[]]}', '{"type":[]}', '{"const":1,"type":{}}', '{"type":"x"}'),
            '{"properties":{"\\ud800":{"uniqueItems":true}}}',
        )
    ),
]


@pytest.mark.parametrize(
    ("kind", "fields", "reason", "says"),
    [bad[1:] for bad in BAD_SPECS],
    ids=[bad[0] for bad in BAD_SPECS],
)
def test_bad_specs(
    stubs: Stubs, client: GrammarClient, kind: Any, fields: dict[str, Any], reason: str, says: str
) -> None:
    client.register_tokenizer(TOKENS)
    spec = grammars.GrammarSpec(type=kind, **fields)
    request = grammars.CompileGrammarRequest(tokenizer_id=TOKENS.id, spec=spec)
    for _ in range(2):  # a refusal isn't taken for a grammar the second time
        refusal = refused(lambda: stubs.grammars.CompileGrammar(request, timeout=SECONDS))
        assert refusal[:2] == ("INVALID_ARGUMENT", reason)
        assert says in refusal.message
    assert client.compile(GrammarSpec.choice(["x"]), TOKENS).id.startswith("gra-")


# Of an upload: its header, its chunks, the code, the reason and what the message says.
BAD_UPLOADS = {
    "nothing": ([], "TOKENIZER_INVALID", "begins with its header"),
    "no header": ([["a"]], "TOKENIZER_INVALID", "begins with its header"),
    "two headers": ([{"vocab_size": 1}, {"vocab_size": 1}], "TOKENIZER_INVALID", "chunks only"),
    "an empty part": ([{"vocab_size": 1}, None], "TOKENIZER_INVALID", "chunks only"),
    "too few": ([{"vocab_size": 2}, ["a"]], "TOKENIZER_INVALID", "2 tokens announced, 1 came"),
    "too many": ([{"vocab_size": 1}, ["a"], ["b"]], "TOKENIZER_INVALID", "1 tokens announced"),
    "no size": ([{}, ["a"]], "TOKENIZER_INVALID", "vocab_size"),
    "a huge size": ([{"vocab_size": 2**32 - 1}], "TOKENIZER_TOO_LARGE", "4194304"),
    "a huge width": ([{"vocab_size": 1, "width": 2**31}], "TOKENIZER_TOO_LARGE", "4194304"),
    "a stop token past all": (
        [{"vocab_size": 1, "stop_token_ids": [1]}, ["a"]],
        *("TOKENIZER_INVALID", "stop token"),
    ),
    "a special token past all": (
        [{"vocab_size": 1, "special_token_ids": [9]}, ["a"]],
        *("TOKENIZER_INVALID", "special token"),
    ),
}


@pytest.mark.parametrize(("parts", "reason", "says"), BAD_UPLOADS.values(), ids=BAD_UPLOADS)
def test_bad_uploads(stubs: Stubs, parts: list[Any], reason: str, says: str) -> None:
    def part(content: Any) -> tokenizers.RegisterTokenizerRequest:
        if isinstance(content, dict):
            header = tokenizers.TokenizerHeader(**content)
            return tokenizers.RegisterTokenizerRequest(header=header)
        if content is None:
            return tokenizers.RegisterTokenizerRequest()
        chunk = tokenizers.TokenizerChunk(tokens=[token.encode() for token in content])
        return tokenizers.RegisterTokenizerRequest(chunk=chunk)

    upload = [part(content) for content in parts]
    refusal = refused(lambda: stubs.tokenizers.RegisterTokenizer(iter(upload), timeout=SECONDS))
    code = "INVALID_ARGUMENT" if reason == "TOKENIZER_INVALID" else "RESOURCE_EXHAUSTED"
    assert refusal[:2] == (code, reason)
    assert says in refusal.message
    # A sound one, of the same channel.
    header = part({"vocab_size": len(TOKENS.tokens), "stop_token_ids": TOKENS.stop_token_ids})
    header.header.special_token_ids.extend(TOKENS.special_token_ids)
    chunk = tokenizers.TokenizerChunk(tokens=TOKENS.tokens)
    sound = [header, tokenizers.RegisterTokenizerRequest(chunk=chunk)]
    answer = stubs.tokenizers.RegisterTokenizer(iter(sound), timeout=SECONDS)
    assert answer.tokenizer.id == TOKENS.id


@pytest.mark.parametrize("unknown", ["", "nobody", "x" * 100_000, "a\0b", "../../etc/passwd", "ü"])
def test_unknown_ids(stubs: Stubs, unknown: str) -> None:
    calls = {
        "UNKNOWN_TOKENIZER": lambda: stubs.tokenizers.GetTokenizer(
            tokenizers.GetTokenizerRequest(tokenizer_id=unknown), timeout=SECONDS
        ),
        # Of a compile, the tokenizer is looked up before anything else.
        "UNKNOWN_TOKENIZER ": lambda: stubs.grammars.CompileGrammar(
            grammars.CompileGrammarRequest(tokenizer_id=unknown), timeout=SECONDS
        ),
        "UNKNOWN_GRAMMAR": lambda: stubs.grammars.GetGrammar(
            grammars.GetGrammarRequest(grammar_id=unknown), timeout=SECONDS
        ),
        "UNKNOWN_SEQUENCE": lambda: stubs.sequences.GetSequence(
            sequences.GetSequenceRequest(sequence_id=unknown), timeout=SECONDS
        ),
    }
    for reason, call in calls.items():
        refusal = refused(call)
        assert refusal[:2] == ("NOT_FOUND", reason.strip())
        assert len(refusal.message) < 500
