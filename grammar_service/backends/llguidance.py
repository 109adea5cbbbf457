"""The llguidance backend of the service; see `engine_client.in_process_llguidance`.

There is no artifact: building a matcher is the compile, about 2 ms. A child builds it first, so
that what crashes or doesn't end does so there; the service builds it again, and copies it.
"""

import threading
from collections.abc import Sequence
from importlib.metadata import version

import torch
from llguidance import LLExecutor, LLMatcher

from engine_client.in_process_llguidance import Matcher, build, fill, lark_of, tokenizer_of
from engine_client.spec import GrammarSpec
from engine_client.vocabulary import Vocabulary
from grammar_service.errors import Invalid

# The library tells no sizes. Resident memory, 129k tokens: a grammar of 250 bytes of Lark took 5 kB
# built and 8 kB more after 40 tokens (of 150), one of 15 kB took 375 kB and 153 kB more (of 40). A
# matcher took 0.8 kB at the start and 147 B a token over 100 tokens (of 2,000).
_COMPILED_BYTES = 20_000
_COMPILED_BYTES_A_BYTE = 40
_MATCHER_BYTES = 1_000
_MATCHER_BYTES_A_TOKEN = 150


class _Compiled:
    """What all matchers of a grammar are copies of."""

    __slots__ = ("end", "prototype", "size")

    def __init__(self, prototype: LLMatcher, end: int, size: int) -> None:
        self.prototype = prototype
        self.end = end
        self.size = size


class LLGuidanceBackend:
    """Matches with LLMatcher, fills with LLExecutor."""

    name = "llguidance"
    version = version("llguidance")

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._local = threading.local()

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Builds the tokenizer."""
        try:
            tokenizer_of(vocabulary)
        except ValueError:
            return  # each spec says so

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> bytes:
        """Builds a matcher to see whether it can be built; the artifact is the grammar's text."""
        try:
            text = lark_of(spec)
            build(text, vocabulary)
        except ValueError as error:
            raise Invalid("SPEC_UNSUPPORTED", str(error)) from None
        return text.encode()

    def load(self, artifact: bytes, spec: GrammarSpec, vocabulary: Vocabulary) -> _Compiled:
        """Builds the matcher that all others are copies of. Raises ValueError."""
        end = tokenizer_of(vocabulary).eos_token
        return _Compiled(build(artifact.decode(), vocabulary), end, len(artifact))

    def memory_bytes(self, compiled: _Compiled) -> int:
        """An estimate: the library tells none."""
        return _COMPILED_BYTES + _COMPILED_BYTES_A_BYTE * compiled.size

    def matcher(self, compiled: _Compiled, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher at the start."""
        return Matcher(compiled.prototype.deep_copy(), compiled.end, stop_token_ids)

    def matcher_bytes(self, length: int) -> int:
        """Estimated memory of a matcher that took `length` tokens."""
        return _MATCHER_BYTES + _MATCHER_BYTES_A_TOKEN * length

    def fork(self, matcher: Matcher) -> Matcher:
        """An independent copy."""
        return matcher.fork()

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[bool]:
        """One token for each matcher."""
        return [matcher.accept(token) for matcher, token in zip(matchers, tokens, strict=True)]

    def rollback(self, matchers: Sequence[Matcher], counts: Sequence[int]) -> None:
        """Takes back each matcher's last tokens."""
        for matcher, count in zip(matchers, counts, strict=True):
            matcher.rollback(count)

    def completed(self, matchers: Sequence[Matcher]) -> list[bool]:
        """Whether each matcher may end now."""
        return [matcher.completed() for matcher in matchers]

    def terminated(self, matcher: Matcher) -> bool:
        """Whether a stop token was accepted."""
        return matcher.ended

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """Writes the mask of each matcher to its row."""
        fill(self._executor(), matchers, masks, rows)

    def _executor(self) -> LLExecutor:
        """One a calling thread, as its pool serves one call at a time."""
        executor: LLExecutor | None = getattr(self._local, "executor", None)
        if executor is None:
            executor = self._local.executor = LLExecutor(self._threads)
        return executor
