"""Reduced public bug reports as tests of our own; each test names the report that it comes from."""

from typing import Any

from engine_client import Grammar, GrammarClient, GrammarSpec, Outcome, Row, StepResult
from tests.support import allowed, toy

# What most reports are about: {"a":1}, with any integer, and white space nowhere.
OPEN, CLOSE, KEY, COLON, ONE, SPACE, LETTER, EOS = range(8)
OBJECT_TOKENS = toy(["{", "}", '"a"', ":", "1", " ", "x", "<eos>"], stop=[EOS])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
OBJECT = GrammarSpec.json_schema(SCHEMA, max_whitespace=0)
TEXT = [OPEN, KEY, COLON, ONE, CLOSE]


class Request:
    """A sequence as an engine has it: an id, and the list of its tokens.

    `options` are those of `Row`.
    """

    def __init__(
        self, client: GrammarClient, grammar: Grammar, sequence_id: str, **options: Any
    ) -> None:
        self.id = sequence_id
        self.tokens: list[int] = []
        self._client = client
        self._grammar = grammar
        self._options = options

    def row(self, position: int | None = None, drafts: tuple[int, ...] = ()) -> Row:
        """Its row in a step; by default one that brings no new token."""
        position = len(self.tokens) if position is None else position
        return Row(self.id, self._grammar, self.tokens, position, drafts, **self._options)

    def step(self, position: int | None = None, drafts: tuple[int, ...] = ()) -> StepResult:
        """A step of its own."""
        return self._client.step([self.row(position, drafts)])

    def accept(self, *tokens: int) -> Outcome:
        """Takes tokens, as the engine sampled them."""
        position = len(self.tokens)
        self.tokens += tokens
        return self.step(position).outcomes[0]

    def rewind(self, count: int) -> StepResult:
        """Takes its last tokens back."""
        del self.tokens[len(self.tokens) - count :]
        return self.step()

    def allowed(self) -> list[int]:
        """The tokens that may come next."""
        return allowed(self.step().mask(0))

    def chain(self, *drafts: int) -> tuple[int, list[list[int]]]:
        """How many drafts are legal, and what is allowed before the first and after each."""
        result = self.step(drafts=drafts)
        return result.legal_drafts[0], [allowed(mask) for mask in result.masks]
