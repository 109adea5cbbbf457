"""The tokenizers that this replica holds, by content."""

import threading

from engine_client.vocabulary import Vocabulary
from grammar_service import metrics
from grammar_service.errors import Exhausted, NotFound


class Tokenizers:
    """Holds vocabularies by id. Thread-safe. Never drops one: sequences depend on them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: dict[str, Vocabulary] = {}
        self._lock = threading.Lock()

    def add(self, vocabulary: Vocabulary) -> bool:
        """Holds a vocabulary; True when it was held before. Raises Exhausted."""
        with self._lock:
            if vocabulary.id in self._by_id:
                return True
            if len(self._by_id) >= self._limit:
                raise Exhausted(
                    "TOO_MANY_TOKENIZERS", f"{self._limit} tokenizers are held (max_tokenizers)"
                )
            self._by_id[vocabulary.id] = vocabulary
            metrics.TOKENIZERS.set(len(self._by_id))
            return False

    def get(self, tokenizer_id: str) -> Vocabulary:
        """The vocabulary of that id. Raises NotFound with UNKNOWN_TOKENIZER."""
        try:
            return self._by_id[tokenizer_id]
        except KeyError:
            raise NotFound(
                "UNKNOWN_TOKENIZER",
                f"tokenizer {tokenizer_id[:64]!r} isn't registered here; register it first",
            ) from None

    def all(self) -> list[Vocabulary]:
        """All vocabularies, oldest first."""
        return list(self._by_id.values())
