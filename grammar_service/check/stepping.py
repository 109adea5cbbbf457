"""Steps texts through their grammars, as an engine with continuous batching would.

Every text is a row. A step takes all rows one token further; texts that are settled make room.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_client import Grammar, GrammarClient, Note, Outcome, Row, Vocabulary
from grammar_service.check.cases import Report, checked

_ROWS = 256
"""Texts that are stepped at once."""
_SHOWN = 5
"""Allowed tokens that are named where another was refused."""
_NO_NOTE = Note()

Mask = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class PreparedCase:
    """A case whose grammar is compiled and whose texts are tokens; None can't be spelled."""

    number: int
    id: str | int
    grammar: Grammar
    tokens: Sequence[Sequence[int] | None]
    results: list[Report] = field(init=False)
    open: int = field(init=False)
    """Texts without a result."""

    def __post_init__(self) -> None:
        self.results = [{} for _ in self.tokens]
        self.open = len(self.tokens)


@dataclass(slots=True, eq=False)
class _Text:
    """One text on its way."""

    case: PreparedCase
    index: int
    tokens: Sequence[int]
    taken: list[int]
    """The first of them; its row has this very list."""
    row: Row


class Stepping:
    """Takes prepared cases from a queue, and sends the report of each. For one thread."""

    def __init__(
        self,
        client: GrammarClient,
        prepared: "Queue[PreparedCase]",
        send: Callable[[dict[str, Any]], None],
    ) -> None:
        self._client = client
        self._prepared = prepared
        self._send = send
        self._waiting: deque[_Text] = deque()
        self._active: list[_Text] = []

    def run(self) -> None:
        """Steps for ever."""
        while True:
            self._admit()
            if self._active:
                self._step()

    def _admit(self) -> None:
        """Fills the rows; waits for a case only when there is nothing to step."""
        while len(self._active) < _ROWS:
            if self._waiting:
                self._active.append(self._waiting.popleft())
            elif self._prepared.empty() and self._active:
                return
            else:
                self._begin(self._prepared.get())

    def _begin(self, case: PreparedCase) -> None:
        self._send({"stepping": case.number})
        for index, tokens in enumerate(case.tokens):
            if tokens is None:
                self._settle(case, index, _refused(None, "the tokenizer can't spell this text"))
            else:
                taken: list[int] = []
                row = Row(f"{case.number}-{index}", case.grammar, taken)
                self._waiting.append(_Text(case, index, tokens, taken, row))
        if not case.tokens:
            self._finish(case)

    def _step(self) -> None:
        result = self._client.step([text.row for text in self._active])
        masks = result.masks.numpy()
        going, ended = [], []
        for row, text in enumerate(self._active):
            note = result.notes.get(row, _NO_NOTE)
            report = _judge(text, result.outcomes[row], masks[row], note)
            if report is None:
                going.append(text)
            else:
                ended.append((text, report))
        self._active = going
        self._client.close_sequences([text.row.sequence_id for text, _ in ended])
        for text, report in ended:
            self._settle(text.case, text.index, report)

    def _settle(self, case: PreparedCase, index: int, report: Report) -> None:
        case.results[index] = report
        case.open -= 1
        if case.open == 0:
            self._finish(case)

    def _finish(self, case: PreparedCase) -> None:
        report = checked(case.id, case.grammar, case.results)
        self._send({"finished": case.number, "report": report})


def _judge(text: _Text, outcome: Outcome, mask: Mask, note: Note) -> Report | None:
    """The report of a text that is settled; None, and one more token is taken."""
    tokens, taken = text.tokens, len(text.taken)
    grammar = text.case.grammar
    vocabulary = grammar.vocabulary
    assert vocabulary is not None  # it was compiled here
    if outcome is Outcome.REJECTED:
        named = _named(vocabulary, tokens[note.accepted])
        why = f"token {note.accepted} ({named}) was refused though its mask bit was set"
        return _refused(note.accepted, f"{why}: {note.message}")
    if outcome is Outcome.FAILED:
        why = f"after {taken} tokens the service failed with {note.reason}: {note.message}"
        return _refused(taken if taken < len(tokens) else None, why)
    if taken < len(tokens):
        token = tokens[taken]
        if _allows(mask, token):
            text.taken.append(token)
            text.row.position = taken
            return None
        why = f"token {taken} ({_named(vocabulary, token)}) isn't allowed"
        return _refused(taken, f"{why}; {_alternatives(vocabulary, mask)}")
    may_end = outcome in (Outcome.COMPLETE, Outcome.TERMINATED)
    if may_end or any(_allows(mask, token) for token in grammar.stop_token_ids):
        return {"accepted": True, "at": None, "why": None}
    why = "all tokens are allowed, but the grammar can't end after the last"
    return _refused(None, f"{why}; {_alternatives(vocabulary, mask)}")


def _refused(at: int | None, why: str) -> Report:
    return {"accepted": False, "at": at, "why": why}


def _allows(mask: Mask, token: int) -> bool:
    """Whether a token's bit is set; those past the width have none."""
    word = token >> 5
    return word < len(mask) and bool(int(mask[word]) >> (token & 31) & 1)


def _alternatives(vocabulary: Vocabulary, mask: Mask) -> str:
    """What the mask allows instead, in a few words."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits).tolist()
    named = ", ".join(_named(vocabulary, token) for token in allowed[:_SHOWN])
    if len(allowed) <= _SHOWN:
        return f"allowed is {named or 'nothing'}"
    return f"allowed are {len(allowed)} tokens, such as {named}"


def _named(vocabulary: Vocabulary, token: int) -> str:
    return repr(vocabulary.tokens[token].decode(errors="replace"))
