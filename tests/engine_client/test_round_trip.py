"""A vocabulary's bytes against the tokenizer that they came from."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from engine_client.round_trip import round_trip
from engine_client.vocabulary import Vocabulary
from tests.engine_client.tokenizers import byte_level, of_pieces, sentencepiece


def test_round_trip_passes_for_sound_tokenizers() -> None:
    padded = byte_level()
    padded.enable_padding(length=512)
    for backend in (byte_level(), byte_level(add_prefix_space=True), padded):
        assert round_trip(Vocabulary.from_huggingface(backend), backend) == []


@pytest.mark.parametrize("prepend", ["normalizer", "always", "never"])
def test_round_trip_allows_the_one_space_that_a_tokenizer_prepends(prepend: Any) -> None:
    backend = sentencepiece()
    if prepend == "normalizer":
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    vocabulary = Vocabulary.from_huggingface(backend)
    assert round_trip(vocabulary, backend) == []
    # One space too many, put there by the vocabulary.
    tokens = [*vocabulary.tokens[:-1], b" lea"]
    problems = round_trip(Vocabulary(tokens, len(tokens)), backend, [" leads", "leads"])
    said = ["space that this tokenizer puts" in problem for problem in problems]
    assert (
        said == {"normalizer": [True, True], "always": [False, True], "never": [False] * 2}[prepend]
    )


def test_round_trip_allows_a_normal_form() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC()])
    assert backend.encode("e\u0301").ids == backend.encode("\u00e9").ids
    assert round_trip(Vocabulary.from_huggingface(backend), backend) == []


def without_spaces(token: bytes) -> bytes:
    return token.removeprefix(b" ")


def lossy(token: bytes) -> bytes:
    return token.decode(errors="replace").encode()


@pytest.mark.parametrize(
    ("broken", "sample"), [(without_spaces, " leading"), (lossy, "\U0001f600")]
)
def test_round_trip_finds_wrong_bytes(broken: Callable[[bytes], bytes], sample: str) -> None:
    backend = byte_level()
    tokens = [broken(token) for token in Vocabulary.from_huggingface(backend).tokens]
    vocabulary = Vocabulary(tokens, len(tokens))
    (problem,) = round_trip(vocabulary, backend, ["ok", sample])
    assert problem.startswith(repr(sample))
    assert problem.endswith("the vocabulary's bytes are wrong")
    assert round_trip(vocabulary, backend) != []


@pytest.mark.parametrize("backend", [byte_level(), sentencepiece()])
def test_round_trip_tells_when_the_tokenizer_itself_changes_a_text(backend: Tokenizer) -> None:
    backend.pre_tokenizer = backend.pre_tokenizer or pre_tokenizers.Metaspace()
    backend.normalizer = normalizers.Lowercase()
    (problem,) = round_trip(Vocabulary.from_huggingface(backend), backend, ["abc", "ABC"])
    assert problem.startswith("'ABC': expected b'ABC'")
    assert problem.endswith("the tokenizer changes this text")


def test_round_trip_finds_an_id_that_the_vocabulary_lacks() -> None:
    assert round_trip(Vocabulary([b"a"], 1), of_pieces("a", "b"), ["a", "ab"]) == [
        "'ab': token 1 isn't in the vocabulary"
    ]
