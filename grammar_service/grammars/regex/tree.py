"""What an expression says, as a tree. Build it with the functions here: they keep it simple."""

from collections.abc import Iterable
from dataclasses import dataclass

from grammar_service.grammars.regex.charset import ALL, Ranges


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; none is the empty text."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Either:
    """One of some; none is no text at all."""

    branches: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """From `least` to `most` times, without end where that is None."""

    body: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The start of the text or its end. `anchors` takes them out of a tree."""

    at_end: bool
    position: int


Node = Chars | Sequence | Either | Repeat | Anchor

EMPTY = Sequence(())
NOTHING = Either(())


def chars(ranges: Ranges) -> Node:
    """One character of a set."""
    return Chars(ranges) if ranges else NOTHING


def text(value: str) -> Node:
    """Just this text."""
    return sequence(Chars(((ord(char), ord(char)),)) for char in value)


def sequence(parts: Iterable[Node]) -> Node:
    """One after the other."""
    flat: list[Node] = []
    for part in parts:
        for inner in part.parts if isinstance(part, Sequence) else (part,):
            if inner == NOTHING:
                return NOTHING
            # Anything after anything is anything.
            if not (flat and inner == flat[-1] == ANYTHING):
                flat.append(inner)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def either(branches: Iterable[Node]) -> Node:
    """One of some."""
    flat: dict[Node, None] = {}
    for branch in branches:
        flat |= dict.fromkeys(branch.branches if isinstance(branch, Either) else (branch,))
    return next(iter(flat)) if len(flat) == 1 else Either(tuple(flat))


def repeat(body: Node, least: int, most: int | None) -> Node:
    """So many times."""
    if most == 0 or body == EMPTY:
        return EMPTY
    if body == NOTHING:
        return NOTHING if least else EMPTY
    return body if (least, most) == (1, 1) else Repeat(body, least, most)


ANYTHING = Repeat(Chars(ALL), 0, None)
"""Every text."""


def nullable(node: Node) -> bool:
    """Whether the empty text is one of it."""
    match node:
        case Chars() | Anchor():
            return False
        case Sequence(parts):
            return all(map(nullable, parts))
        case Either(branches):
            return any(map(nullable, branches))
        case Repeat(body, least, _):
            return least == 0 or nullable(body)


def nonempty(node: Node) -> Node:
    """All texts of a tree but the empty one."""
    match node:
        case Sequence(parts) if all(map(nullable, parts)):
            # The first part that isn't empty is one of them.
            firsts = (sequence([nonempty(part), *parts[i + 1 :]]) for i, part in enumerate(parts))
            return either(firsts)
        case Either(branches):
            return either(map(nonempty, branches))
        case Repeat(body, least, most) if nullable(node):
            fewer = None if most is None else most - 1
            return sequence([nonempty(body), repeat(body, max(0, least - 1), fewer)])
        case _:
            return node
