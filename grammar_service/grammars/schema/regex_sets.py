"""What texts regular expressions have, as JSON schema searches for them.

The trees are made into nondeterministic automata over ranges of characters, which are walked in
step, so that no expression takes more than a bounded time. Whatever is too large is not disjoint.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from grammar_service.grammars.regex import RegexError, read
from grammar_service.grammars.regex.charset import Ranges, contains
from grammar_service.grammars.regex.tree import Anchor, Chars, Either, Node, Repeat, Sequence

_MAX_STATES = 40_000
_MAX_PAIRS = 20_000


class TooLarge(RegexError):
    """The automaton would have too many states."""


class _Automaton:
    """States with moves on character ranges and moves on nothing; 0 is the start."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[Ranges, int]]] = []
        self.free: list[list[int]] = []
        self.start = self.state()

    def state(self) -> int:
        if len(self.moves) >= _MAX_STATES:
            raise TooLarge("the expression repeats too much")
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        seen = set(states)
        stack = list(seen)
        while stack:
            for state in self.free[stack.pop()]:
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
        return frozenset(seen)


@lru_cache(maxsize=1024)
def disjoint(first: str, second: str) -> bool:
    """Whether no text has a match of both patterns; also False where that can't be told."""
    try:
        return not _meet(*_automaton(first), *_automaton(second))
    except RegexError:
        return False


def matches(pattern: str, text: str) -> bool:
    """Whether a text has a match of a pattern. Raises RegexError where that can't be told."""
    automaton, end = _automaton(pattern)
    states = automaton.closure([automaton.start])
    for character in text:
        states = automaton.closure(
            after
            for state in states
            for ranges, after in automaton.moves[state]
            if contains(ranges, ord(character))
        )
    return end in states


def _meet(one: _Automaton, one_end: int, two: _Automaton, two_end: int) -> bool:
    start = (one.closure([one.start]), two.closure([two.start]))
    seen, stack = {start}, [start]
    while stack:
        left, right = stack.pop()
        if one_end in left and two_end in right:
            return True
        for pair in _steps(one, left, two, right):
            if pair not in seen:
                if len(seen) >= _MAX_PAIRS:
                    raise TooLarge("the expressions have too many states")
                seen.add(pair)
                stack.append(pair)
    return False


def _steps(
    one: _Automaton, left: frozenset[int], two: _Automaton, right: frozenset[int]
) -> Iterable[tuple[frozenset[int], frozenset[int]]]:
    lefts = [move for state in left for move in one.moves[state]]
    rights = [move for state in right for move in two.moves[state]]
    # Between two neighbouring borders all characters do the same.
    borders = sorted({border for ranges, _ in lefts + rights for low, high in ranges
                      for border in (low, high + 1)})  # fmt: skip
    for character in borders:
        after_left = {state for ranges, state in lefts if contains(ranges, character)}
        after_right = {state for ranges, state in rights if contains(ranges, character)}
        if after_left and after_right:
            yield one.closure(after_left), two.closure(after_right)


@lru_cache(maxsize=256)
def _automaton(pattern: str) -> tuple[_Automaton, int]:
    automaton = _Automaton()
    return automaton, _add(automaton, automaton.start, read(pattern, search=True))


def _add(automaton: _Automaton, state: int, node: Node) -> int:
    """Adds a tree behind a state; returns the state behind it."""
    match node:
        case Chars(ranges):
            end = automaton.state()
            automaton.moves[state].append((ranges, end))
            return end
        case Sequence(parts):
            for part in parts:
                state = _add(automaton, state, part)
            return state
        case Either(branches):
            end = automaton.state()
            for branch in branches:
                automaton.free[_add(automaton, state, branch)].append(end)
            return end
        case Repeat(body, least, most):
            return _repeat(automaton, state, body, least, most)
        case Anchor():
            raise ValueError("an anchor wasn't resolved")


def _repeat(automaton: _Automaton, state: int, body: Node, least: int, most: int | None) -> int:
    for _ in range(least):
        state = _add(automaton, state, body)
    if most is None:
        loop = automaton.state()
        automaton.free[state].append(loop)
        automaton.free[_add(automaton, loop, body)].append(loop)
        return loop
    end = automaton.state()
    for _ in range(most - least):
        automaton.free[state].append(end)
        state = _add(automaton, state, body)
    automaton.free[state].append(end)
    return end


def literal(text: str) -> str:
    """The pattern of just this text."""
    return f"^{re.escape(text)}$"
