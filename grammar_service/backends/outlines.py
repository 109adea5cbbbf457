"""The outlines-core backend: a regular expression as a table of states and tokens.

Only the compile, in a child, uses the library. It gives the table as plain arrays, which the
service steps through by itself: a state is a number, and its mask is kept once it was asked for.
(The library's own binary form isn't meant for data from elsewhere, and its Guide forgets all but
32 steps.)
"""

import struct
import threading
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import numpy.typing as npt
import torch

from engine_client.spec import GrammarSpec, GrammarType
from engine_client.vocabulary import Vocabulary
from grammar_service.errors import Invalid
from grammar_service.grammars.regex import NOTHING, RegexError, read, write
from grammar_service.grammars.regex.tree import nonempty, nullable
from grammar_service.masks.layout import Row, row_of

_MATCHER_BYTES = 400
_MATCHER_BYTES_A_TOKEN = 32
_KEPT_MASK_BYTES = 16 << 20
_WHITE_SPACE = r"[ \n\r\t]"

_ONLY_EMPTY = struct.pack("<II3I", 1, 0, 0, 0, 1)
"""The table of the empty text alone: one state, final, without edges. The library has no such."""


class _Compiled:
    """The table: of state s, tokens[starts[s]:starts[s + 1]], ascending, lead to targets."""

    def __init__(self, artifact: bytes, vocabulary: Vocabulary) -> None:
        self.width = vocabulary.width
        states, edges = struct.unpack_from("<II", artifact)
        numbers = np.frombuffer(artifact, dtype="<u4", offset=8)
        if len(numbers) != states + 1 + states + 2 * edges:
            raise ValueError("the table is cut short")
        self.starts, self.final, self.tokens, self.targets = np.split(
            numbers, np.cumsum([states + 1, states, edges])
        )
        self.size = len(artifact)
        self._masks: dict[int, Row] = {}
        self._kept = max(1, _KEPT_MASK_BYTES // (vocabulary.width // 8 + 1))
        self._lock = threading.Lock()

    def edges(self, state: int) -> slice:
        """Where the edges of a state are."""
        return slice(int(self.starts[state]), int(self.starts[state + 1]))

    def next(self, state: int, token: int) -> int | None:
        """The state that a token leads to."""
        edges = self.edges(state)
        tokens = self.tokens[edges]
        at = int(np.searchsorted(tokens, token))
        if at == len(tokens) or tokens[at] != token:
            return None
        return int(self.targets[edges][at])

    def mask(self, state: int) -> Row:
        """The tokens that lead on, kept for the states asked for last."""
        with self._lock:
            mask = self._masks.pop(state, None)
            if mask is None:
                mask = row_of(self.tokens[self.edges(state)].tolist(), self.width)
                if len(self._masks) >= self._kept:
                    del self._masks[next(iter(self._masks))]
            self._masks[state] = mask
            return mask


class _Matcher:
    """The states so far, and whether a stop token ended it."""

    __slots__ = ("compiled", "ended", "states", "stops")

    def __init__(self, compiled: _Compiled, stops: tuple[int, ...], states: list[int]) -> None:
        self.compiled = compiled
        self.stops = stops
        self.states = states
        self.ended = False


class OutlinesBackend:
    """Compiles with `outlines_core.Index`, matches by table."""

    name = "outlines"
    version = version("outlines-core")

    def __init__(self, threads: int = 1) -> None:
        """`threads` has no use: a mask is a copy."""

    def prepare(self, vocabulary: Vocabulary) -> None:
        """The library takes a vocabulary anew with each spec."""

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> bytes:
        """Builds the table. Raises Invalid with SPEC_UNSUPPORTED."""
        from outlines_core import Index
        from outlines_core import Vocabulary as Tokens

        spare, ids = _by_bytes(vocabulary)
        pattern, may_be_empty = _regex(spec)
        if pattern is None:
            return _ONLY_EMPTY
        try:
            # The library takes the first alternative that matches, and no longer one; with a $ none
            # matches before the end. It can't have one at the very start, so the pattern is one
            # for all texts but the empty one.
            index = Index(f"(?:{pattern})$", Tokens(spare, ids))
        except Exception as error:  # the library raises no narrower class
            raise Invalid("SPEC_UNSUPPORTED", f"outlines: {str(error)[:1000]}") from None
        return _table(index, spare, may_be_empty)

    def load(self, artifact: bytes, spec: GrammarSpec, vocabulary: Vocabulary) -> _Compiled:
        """Takes in a table. Raises ValueError for one that is cut short."""
        return _Compiled(artifact, vocabulary)

    def memory_bytes(self, compiled: _Compiled) -> int:
        """The table, and the masks that may be kept."""
        return compiled.size + min(_KEPT_MASK_BYTES, compiled.size)

    def matcher(self, compiled: _Compiled, stop_token_ids: Sequence[int]) -> _Matcher:
        """A matcher at the start."""
        return _Matcher(compiled, tuple(stop_token_ids), [0])

    def matcher_bytes(self, length: int) -> int:
        """Estimated memory of a matcher that took `length` tokens."""
        return _MATCHER_BYTES + _MATCHER_BYTES_A_TOKEN * length

    def fork(self, matcher: _Matcher) -> _Matcher:
        """An independent copy."""
        copy = _Matcher(matcher.compiled, matcher.stops, list(matcher.states))
        copy.ended = matcher.ended
        return copy

    def accept(self, matchers: Sequence[_Matcher], tokens: Sequence[int]) -> list[bool]:
        """One token for each matcher."""
        return [_accept(matcher, token) for matcher, token in zip(matchers, tokens, strict=True)]

    def rollback(self, matchers: Sequence[_Matcher], counts: Sequence[int]) -> None:
        """Takes back each matcher's last tokens."""
        for matcher, count in zip(matchers, counts, strict=True):
            inner_count = count - 1 if matcher.ended else count
            matcher.ended = False
            if inner_count:
                del matcher.states[-inner_count:]

    def completed(self, matchers: Sequence[_Matcher]) -> list[bool]:
        """Whether each matcher may end now."""
        return [bool(m.compiled.final[m.states[-1]]) for m in matchers]

    def terminated(self, matcher: _Matcher) -> bool:
        """Whether a stop token was accepted."""
        return matcher.ended

    def fill(self, matchers: Sequence[_Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """Writes the mask of each matcher to its row."""
        words = masks.numpy()
        bits = words.view(np.uint32)
        for matcher, row in zip(matchers, rows, strict=True):
            state = matcher.states[-1]
            words[row] = matcher.compiled.mask(state)
            may_end = matcher.compiled.final[state]
            for token in matcher.stops:
                bit = np.uint32(1 << (token % 32))
                if may_end:
                    bits[row, token // 32] |= bit
                else:
                    bits[row, token // 32] &= ~bit


def _accept(matcher: _Matcher, token: int) -> bool:
    if matcher.ended:
        return False
    state = matcher.states[-1]
    if token in matcher.stops:
        matcher.ended = bool(matcher.compiled.final[state])
        return matcher.ended
    target = matcher.compiled.next(state, token)
    if target is None:
        return False
    matcher.states.append(target)
    return True


def _by_bytes(vocabulary: Vocabulary) -> tuple[int, dict[bytes, list[int]]]:
    """An id that no text has, for the library's end token, and the other ids by their bytes."""
    special = set(vocabulary.special_token_ids)
    ids: dict[bytes, list[int]] = {}
    for token_id, token in enumerate(vocabulary.tokens[: vocabulary.width]):
        if token and token_id not in special:
            ids.setdefault(token, []).append(token_id)
    return max(len(vocabulary.tokens), vocabulary.width), ids


def _table(index: "object", end: int, may_be_empty: bool) -> bytes:
    """The library's index as arrays; its end token goes.

    State 0 is a copy of its start, to which others may lead, so that it alone says whether the text
    may be empty.
    """
    transitions: dict[int, dict[int, int]] = index.get_transitions()  # type: ignore[attr-defined]
    finals: set[int] = index.get_final_states()  # type: ignore[attr-defined]
    start: int = index.get_initial_state()  # type: ignore[attr-defined]
    states = [start, *sorted({start, *transitions, *finals})]
    names = {state: number for number, state in enumerate(states)}
    starts, tokens, targets = [0], [], []
    for state in states:
        edges = sorted((t, s) for t, s in transitions.get(state, {}).items() if t != end)
        tokens += [token for token, _ in edges]
        targets += [names[target] for _, target in edges]
        starts.append(len(tokens))
    final = [int(may_be_empty), *(int(state in finals) for state in states[1:])]
    numbers: npt.NDArray[np.uint32] = np.array([*starts, *final, *tokens, *targets], dtype="<u4")
    return struct.pack("<II", len(states), len(tokens)) + numbers.tobytes()


def _regex(spec: GrammarSpec) -> tuple[str | None, bool]:
    """An expression for the spec's texts but the empty one, and whether that is one of them.

    None where the empty text is the only one.
    """
    match spec.type:
        case GrammarType.REGEX:
            try:
                tree = read(spec.source)
            except RegexError as error:
                raise Invalid("SPEC_INVALID", f"outlines: {error}") from None
            rest, may_be_empty = nonempty(tree), nullable(tree)
            only_empty = may_be_empty and rest == NOTHING
            return None if only_empty else write(rest), may_be_empty
        case GrammarType.CHOICE:
            return "|".join(map(_literal, spec.choices)), False
        case GrammarType.JSON_SCHEMA:
            from outlines_core.json_schema import build_regex_from_schema

            white = f"{_WHITE_SPACE}{{0,{spec.max_whitespace}}}"
            try:
                return str(build_regex_from_schema(spec.source, white)), False
            except Exception as error:  # the library raises no narrower class
                raise Invalid("SPEC_UNSUPPORTED", f"outlines: {str(error)[:1000]}") from None
        case _:
            raise Invalid("SPEC_UNSUPPORTED", f"outlines doesn't speak {spec.type}")


def _literal(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$#&-~" else char for char in text)
