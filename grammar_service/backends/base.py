"""What a grammar library has to offer. Calls take batches, because they are the hot ones.

A compile happens in a child process and gives bytes; the service loads them. A matcher is a cache
of what its grammar and tokens determine: whatever goes wrong with one, replaying rebuilds it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine_client.spec import GrammarSpec
from engine_client.vocabulary import Vocabulary

Compiled = Any
"""A backend's compiled grammar; shared by all its matchers, never changed."""
Matcher = Any
"""A backend's live state of one sequence."""


class Backend(Protocol):
    """One grammar library."""

    name: str
    version: str

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Builds what any spec over the vocabulary needs, so that the first one doesn't wait."""

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> bytes:
        """Compiles in a child process. Raises Invalid with SPEC_INVALID or SPEC_UNSUPPORTED."""

    def load(self, artifact: bytes, spec: GrammarSpec, vocabulary: Vocabulary) -> Compiled:
        """Takes in what `compile` gave, possibly in another process of the same version."""

    def memory_bytes(self, compiled: Compiled) -> int:
        """Memory of a compiled grammar."""

    def matcher(self, compiled: Compiled, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher at the start. Stop tokens, at least one, are legal only where it may end."""

    def matcher_bytes(self, length: int) -> int:
        """Estimated memory of a matcher that took `length` tokens."""

    def fork(self, matcher: Matcher) -> Matcher:
        """An independent copy."""

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[bool]:
        """One token for each matcher; False leaves that matcher as it was. Distinct matchers."""

    def rollback(self, matchers: Sequence[Matcher], counts: Sequence[int]) -> None:
        """Takes back each matcher's last `counts` tokens."""

    def completed(self, matchers: Sequence[Matcher]) -> list[bool]:
        """Whether each matcher may end now."""

    def terminated(self, matcher: Matcher) -> bool:
        """Whether a stop token was accepted."""

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """Writes the mask of each matcher, none terminated, to its row of int32[n, words]."""
