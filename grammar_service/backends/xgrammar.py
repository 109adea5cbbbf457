"""The xgrammar backend of the service. How a spec is compiled is in `engine_client.in_process`."""

import threading
from collections.abc import Sequence
from importlib.metadata import version

import torch
import xgrammar

from engine_client.in_process import compile_spec, tokenizer_info
from engine_client.spec import GrammarSpec, GrammarType
from engine_client.vocabulary import Vocabulary
from grammar_service.errors import Invalid

# A matcher's own bytes, from resident memory of 2,000 matchers of a small object schema:
# 8.7 kB at the start, 460 B a token over 100 tokens, 244 B over 1,000.
_MATCHER_BYTES = 9_000
_MATCHER_BYTES_A_TOKEN = 400


class XGrammarBackend:
    """Compiles with `GrammarCompiler`, matches with `BatchGrammarMatcher`."""

    name = "xgrammar"
    version = version("xgrammar")

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._local = threading.local()

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Builds the TokenizerInfo that nearly all specs are compiled against."""
        tokenizer_info(GrammarSpec(GrammarType.JSON_OBJECT), vocabulary)

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> bytes:
        """Compiles a spec; the result is xgrammar's own JSON. Raises Invalid with SPEC_INVALID."""
        try:
            return compile_spec(spec, vocabulary).serialize_json().encode()
        except ValueError as error:
            raise Invalid("SPEC_INVALID", str(error)) from None

    def load(
        self, artifact: bytes, spec: GrammarSpec, vocabulary: Vocabulary
    ) -> xgrammar.CompiledGrammar:
        """Takes in an artifact. Raises RuntimeError for one of another version or tokenizer."""
        info = tokenizer_info(spec, vocabulary)
        return xgrammar.CompiledGrammar.deserialize_json(artifact.decode(), info)

    def memory_bytes(self, compiled: xgrammar.CompiledGrammar) -> int:
        """Memory of a compiled grammar, as xgrammar reports it."""
        return int(compiled.memory_size_bytes)

    def matcher(
        self, compiled: xgrammar.CompiledGrammar, stop_token_ids: Sequence[int]
    ) -> xgrammar.GrammarMatcher:
        """A matcher at the start."""
        return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))

    def matcher_bytes(self, length: int) -> int:
        """Estimated memory of a matcher that took `length` tokens."""
        return _MATCHER_BYTES + _MATCHER_BYTES_A_TOKEN * length

    def fork(self, matcher: xgrammar.GrammarMatcher) -> xgrammar.GrammarMatcher:
        """An independent copy."""
        return matcher.fork()

    def accept(
        self, matchers: Sequence[xgrammar.GrammarMatcher], tokens: Sequence[int]
    ) -> list[bool]:
        """One token for each matcher."""
        return self._batch().batch_accept_token(list(matchers), list(tokens))

    def rollback(self, matchers: Sequence[xgrammar.GrammarMatcher], counts: Sequence[int]) -> None:
        """Takes back each matcher's last tokens."""
        self._batch().batch_rollback(list(matchers), list(counts))

    def completed(self, matchers: Sequence[xgrammar.GrammarMatcher]) -> list[bool]:
        """Whether each matcher may end now."""
        return [matcher.is_completed() for matcher in matchers]

    def terminated(self, matcher: xgrammar.GrammarMatcher) -> bool:
        """Whether a stop token was accepted."""
        return bool(matcher.is_terminated())

    def fill(
        self, matchers: Sequence[xgrammar.GrammarMatcher], masks: torch.Tensor, rows: Sequence[int]
    ) -> None:
        """Writes the mask of each matcher to its row."""
        self._batch().batch_fill_next_token_bitmask(list(matchers), masks, list(rows))

    def _batch(self) -> xgrammar.BatchGrammarMatcher:
        """One a calling thread: it owns a pool of threads that serves one call at a time."""
        batch: xgrammar.BatchGrammarMatcher | None = getattr(self._local, "batch", None)
        if batch is None:
            batch = self._local.batch = xgrammar.BatchGrammarMatcher(max_threads=self._threads)
        return batch
