r"""Whether two regular expressions have no text in common, as far as that can be proven.

Both are read with Python's parser, made into nondeterministic automata over ranges of characters,
and walked in step. Where engines differ (what \d means outside ASCII) the larger set is taken, so
that "disjoint" holds for each of them. Whatever isn't understood is not disjoint.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_parser: Any = re._parser  # type: ignore[attr-defined]
_MAX_STATES = 40_000
_MAX_PAIRS = 20_000
_LAST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]

_CATEGORIES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": ((48, 57), (128, _LAST)),
    "CATEGORY_NOT_DIGIT": ((0, 47), (58, _LAST)),
    "CATEGORY_SPACE": ((9, 13), (28, 32), (128, _LAST)),
    "CATEGORY_NOT_SPACE": ((0, 8), (14, 31), (33, _LAST)),
    "CATEGORY_WORD": ((48, 57), (65, 90), (95, 95), (97, 122), (128, _LAST)),
    "CATEGORY_NOT_WORD": ((0, 47), (58, 64), (91, 94), (96, 96), (123, _LAST)),
}


class _Unclear(Exception):
    """The expression has something that this module doesn't read."""


class _Automaton:
    """States with moves on character ranges and moves on nothing; 0 is the start."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[Ranges, int]]] = []
        self.free: list[list[int]] = []
        self.start = self.state()

    def state(self) -> int:
        if len(self.moves) >= _MAX_STATES:
            raise _Unclear
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
    """Whether no text has a match of both patterns (searched for, as JSON schema does)."""
    try:
        one, one_end = _automaton(first)
        two, two_end = _automaton(second)
        return not _meet(one, one_end, two, two_end)
    except (_Unclear, re.error, OverflowError, RecursionError):
        return False


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
                    raise _Unclear
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
        after_left = {state for ranges, state in lefts if _has(ranges, character)}
        after_right = {state for ranges, state in rights if _has(ranges, character)}
        if after_left and after_right:
            yield one.closure(after_left), two.closure(after_right)


def _has(ranges: Ranges, character: int) -> bool:
    return any(low <= character <= high for low, high in ranges)


@lru_cache(maxsize=256)
def _automaton(pattern: str) -> tuple[_Automaton, int]:
    automaton = _Automaton()
    end = automaton.state()
    parsed = _parser.parse(pattern)
    if parsed.state.flags & ~re.UNICODE:
        raise _Unclear
    tree = list(parsed)
    branches = [tree]
    while len(branches) == 1 and len(tree := branches[0]) == 1 and str(tree[0][0]) == "BRANCH":
        branches = [list(branch) for branch in tree[0][1][1]]
    for branch in branches:
        start = automaton.state()
        automaton.free[automaton.start].append(start)
        anchored = bool(branch) and _anchor(branch[0], ("AT_BEGINNING", "AT_BEGINNING_STRING"))
        closed = bool(branch) and _anchor(branch[-1], ("AT_END", "AT_END_STRING"))
        body = branch[1 if anchored else 0 : len(branch) - 1 if closed else None]
        if not anchored:
            automaton.moves[start].append((((0, _LAST),), start))
        last = _sequence(automaton, start, body)
        if not closed:
            automaton.moves[last].append((((0, _LAST),), last))
        automaton.free[last].append(end)
    return automaton, end


def _anchor(item: Any, names: tuple[str, ...]) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names


def _sequence(automaton: _Automaton, state: int, items: Any) -> int:
    for operator, argument in items:
        state = _item(automaton, state, str(operator), argument)
    return state


def _item(automaton: _Automaton, state: int, operator: str, argument: Any) -> int:
    match operator:
        case "SUBPATTERN":
            if argument[1] or argument[2]:  # flags
                raise _Unclear
            return _sequence(automaton, state, argument[3])
        case "BRANCH":
            end = automaton.state()
            for branch in argument[1]:
                automaton.free[_sequence(automaton, state, branch)].append(end)
            return end
        case "MAX_REPEAT" | "MIN_REPEAT":
            return _repeat(automaton, state, *argument)
        case _:
            end = automaton.state()
            automaton.moves[state].append((_characters(operator, argument), end))
            return end


def _repeat(automaton: _Automaton, state: int, least: int, most: Any, body: Any) -> int:
    for _ in range(least):
        state = _sequence(automaton, state, body)
    if most is _parser.MAXREPEAT:
        loop = automaton.state()
        automaton.free[state].append(loop)
        automaton.free[_sequence(automaton, loop, body)].append(loop)
        return loop
    end = automaton.state()
    for _ in range(most - least):
        automaton.free[state].append(end)
        state = _sequence(automaton, state, body)
    automaton.free[state].append(end)
    return end


def _characters(operator: str, argument: Any) -> Ranges:
    match operator:
        case "LITERAL":
            return ((argument, argument),)
        case "NOT_LITERAL":
            return ((0, argument - 1), (argument + 1, _LAST))
        case "ANY":
            return ((0, _LAST),)
        case "RANGE":
            return (tuple(argument),)
        case "CATEGORY":
            return _CATEGORIES[str(argument)]
        case "IN":
            negated = str(argument[0][0]) == "NEGATE"
            parts = argument[1:] if negated else argument
            if negated and any(str(name) == "CATEGORY" for name, _ in parts):
                return ((0, _LAST),)
            ranges = [pair for part in parts for pair in _characters(str(part[0]), part[1])]
            return _complement(ranges) if negated else tuple(ranges)
        case _:
            raise _Unclear


def _complement(ranges: list[tuple[int, int]]) -> Ranges:
    result, start = [], 0
    for low, high in sorted(ranges):
        if start < low:
            result.append((start, low - 1))
        start = max(start, high + 1)
    if start <= _LAST:
        result.append((start, _LAST))
    return tuple(result)


def literal(text: str) -> str:
    """The pattern of just this text."""
    return f"^{re.escape(text)}$"
