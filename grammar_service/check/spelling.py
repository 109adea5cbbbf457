"""Turns texts into tokens that spell just these texts."""

from engine_client import Vocabulary
from engine_client.vocabulary import load_tokenizer


class Speller:
    """Encodes texts with a tokenizer. Thread-safe.

    A tokenizer may change a text: put a space before it, compose its accents, drop what it doesn't
    know. The tokens of another text prove nothing of this one, so such a text is spelled with the
    longest tokens that fit instead.
    """

    def __init__(self, path: str, vocabulary: Vocabulary) -> None:
        self._tokenizer = load_tokenizer(path)
        # A tokenizer.json may ask for both, for the batches of a training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokens = vocabulary.tokens
        special = set(vocabulary.special_token_ids)
        self._by_bytes = {
            token: token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if token and token_id not in special
        }
        self._longest = max(map(len, self._by_bytes), default=0)

    def spell(self, text: str) -> list[int] | None:
        """The tokens of a text, none for an empty one; None if no tokens spell it."""
        try:
            wanted = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            return None
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if b"".join(self._tokens[token] for token in tokens) == wanted:
            return tokens
        return self._longest_first(wanted)

    def _longest_first(self, text: bytes) -> list[int] | None:
        tokens, start = [], 0
        while start < len(text):
            for end in range(min(start + self._longest, len(text)), start, -1):
                token = self._by_bytes.get(text[start:end])
                if token is not None:
                    break
            else:
                return None
            tokens.append(token)
            start = end
        return tokens
