"""Whether a library, called as the service calls it, takes a text, byte by byte."""

import json
import random
import re
from functools import lru_cache
from typing import Any, cast

import llguidance
import llguidance.numpy
import numpy
import xgrammar
from outlines_core.json_schema import (
    build_regex_from_schema,
)

from engine_client.in_process import compile_spec
from engine_client.spec import GrammarSpec
from grammar_service.grammars.schema import Rules, llguidance_overrides
from tests.support import toy

_TOKENS = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
_EOS = 256
_VOCABULARY = toy(_TOKENS, stop=[_EOS])


class _Bytes:
    """A tokenizer whose tokens are the bytes, as llguidance wants one."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens = _TOKENS
    special_token_ids = (_EOS,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def _llguidance_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=len(_TOKENS))


class Refused(Exception):
    """The library doesn't compile the schema."""


class Texts:
    """The texts that a library admits for a schema, in the form that it is given."""

    def __init__(self, schema: Any, backend: str) -> None:
        self._backend = backend
        self._compiled: Any
        try:
            self._compiled = getattr(self, f"_compile_{backend}")(schema)
        except (RuntimeError, ValueError, re.error) as error:
            raise Refused(str(error)) from None

    def accepts(self, text: str) -> bool:
        return bool(getattr(self, f"_accepts_{self._backend}")(text.encode()))

    def walk(self, chance: random.Random, length: int) -> bytes:
        """What comes of `length` bytes at random, less where the text may only end.

        Fails at a dead end. Only for llguidance.
        """
        matcher = self._compiled.deep_copy()
        text = bytearray()
        while len(text) < length:
            mask = llguidance.numpy.allocate_token_bitmask(1, len(_TOKENS))
            llguidance.numpy.fill_next_token_bitmask(matcher, mask)
            bits = numpy.unpackbits(mask.view(numpy.uint8), bitorder="little")
            allowed = [byte for byte in numpy.flatnonzero(bits).tolist() if byte < _EOS]
            if not allowed:
                break
            text.append(chance.choice(allowed))
            assert matcher.consume_token(text[-1])
        assert len(text) == length or matcher.is_accepting(), bytes(text)
        return bytes(text)

    def _compile_llguidance(self, schema: Any) -> llguidance.LLMatcher:
        if isinstance(schema, Rules):
            grammar = schema.text(8, ",", ":")
        else:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides=cast(Any, llguidance_overrides(8))
            )
        matcher = llguidance.LLMatcher(_llguidance_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise Refused(matcher.get_error())
        return matcher

    def _accepts_llguidance(self, text: bytes) -> bool:
        matcher = self._compiled.deep_copy()
        tokens = list(text)
        taken = matcher.try_consume_tokens(tokens)
        return bool(taken == len(tokens) and matcher.is_accepting())

    def _compile_xgrammar(self, schema: Any) -> xgrammar.CompiledGrammar:
        return compile_spec(GrammarSpec.json_schema(schema), _VOCABULARY)

    def _accepts_xgrammar(self, text: bytes) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=[_EOS])
        return all(matcher.accept_token(byte) for byte in text) and matcher.accept_token(_EOS)

    def _compile_outlines(self, schema: Any) -> re.Pattern[str]:
        # Its expression says what it enforces; building the index of one can take minutes.
        return re.compile(build_regex_from_schema(json.dumps(schema), r"[ \n\r\t]{0,8}"))

    def _accepts_outlines(self, text: bytes) -> bool:
        return self._compiled.fullmatch(text.decode()) is not None
