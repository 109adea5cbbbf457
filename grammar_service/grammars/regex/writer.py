r"""Writing a tree as an expression that all libraries, and Python, read alike.

Every class is ranges of code points, so nothing is left for them to differ about. Characters are
written as \uXXXX, which they all know, and those past U+FFFF as themselves.
"""

from collections.abc import Iterator

from grammar_service.grammars.regex.charset import Ranges, complement, contains, intersection
from grammar_service.grammars.regex.tree import (
    EMPTY,
    Anchor,
    Chars,
    Either,
    Node,
    Repeat,
    Sequence,
    chars,
    either,
    repeat,
    sequence,
    text,
)

_PLAIN = frozenset("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz _,:;=@%'")
_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""JSON's escapes of one letter."""
_ESCAPED = ((0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\")))
"""What isn't written as itself in a JSON string."""


def write(node: Node) -> str:
    """The expression of a tree without anchors, to be matched as a whole."""
    match node:
        case Chars(ranges):
            if ranges[0][0] == ranges[-1][1]:
                return _character(ranges[0][0])
            return f"[{''.join(_range(low, high) for low, high in ranges)}]"
        case Sequence(parts):
            return "".join(map(_part, parts)) or "(?:)"
        case Either(branches):
            some = [branch for branch in branches if branch != EMPTY]
            joined = "|".join(map(write, some))
            return joined if len(some) == len(branches) else f"(?:{joined})?"
        case Repeat(body, least, most):
            return _atom(body) + _bounds(least, most)
        case Anchor():
            raise ValueError("an anchor wasn't resolved")


def in_json(node: Node, escapes: bool = True) -> Node:
    """The tree of the texts as they stand in a JSON string; a character has one spelling.

    Args:
        node: The tree.
        escapes: Whether texts may have characters that need one.
    """
    match node:
        case Chars(ranges):
            plain = chars(intersection(ranges, complement(_ESCAPED)))
            return either([plain, *_escapes(ranges)]) if escapes else plain
        case Sequence(parts):
            return sequence(in_json(part, escapes) for part in parts)
        case Either(branches):
            return either(in_json(branch, escapes) for branch in branches)
        case Repeat(body, least, most):
            return repeat(in_json(body, escapes), least, most)
        case Anchor():
            return node


def _escapes(ranges: Ranges) -> Iterator[Node]:
    for character, letter in _SHORT.items():
        if contains(ranges, ord(character)):
            yield text(f"\\{letter}")
    for high in (0, 1):
        low = [f"{c % 16:x}" for c in range(16 * high, 16 * high + 16)
               if contains(ranges, c) and chr(c) not in _SHORT]  # fmt: skip
        if low:
            digits = sorted({ord(digit) for d in low for digit in (d, d.upper())})
            yield sequence([text(f"\\u00{high}"), Chars(tuple((d, d) for d in digits))])


def _part(node: Node) -> str:
    written = write(node)
    return f"(?:{written})" if isinstance(node, Either) and EMPTY not in node.branches else written


def _atom(node: Node) -> str:
    return write(node) if isinstance(node, Chars) else f"(?:{write(node)})"


def _bounds(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if short:
        return short
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def _range(low: int, high: int) -> str:
    middle = "-" if high > low + 1 else ""
    return _character(low) + (middle + _character(high) if high > low else "")


def _character(code: int) -> str:
    if chr(code) in _PLAIN or code > 0xFFFF:
        return chr(code)
    return f"\\u{code:04x}"
