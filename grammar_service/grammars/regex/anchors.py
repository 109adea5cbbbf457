"""Taking the anchors out of a tree: what is left matches the whole of a text.

An anchor that stands at an edge, also of an alternative or an optional part there, decides whether
a search may begin or end elsewhere; `(^|,)a` searched for is `(?:|.*,)a.*`. Others are refused.
"""

from grammar_service.grammars.regex.parser import Irregular
from grammar_service.grammars.regex.tree import (
    ANYTHING,
    EMPTY,
    Anchor,
    Chars,
    Either,
    Node,
    Repeat,
    Sequence,
    either,
    sequence,
)


def resolve(node: Node, search: bool) -> Node:
    """The tree of the texts that an expression matches: as a whole, or somewhere if searched for.

    Raises Irregular for an anchor whose meaning depends on what is matched before it.
    """
    outside = ANYTHING if search else EMPTY
    node = _edge(_edge(node, outside, at_end=False), outside, at_end=True)
    left = _anchors(node)
    if left:
        sign = "$" if left[0].at_end else "^"
        raise Irregular(
            f"{sign} at position {left[0].position} isn't at an edge of the expression; "
            "move it there, or leave it out"
        )
    return node


def _edge(node: Node, outside: Node, at_end: bool) -> Node:
    """The node with what may stand outside of it at an edge, less where an anchor forbids that."""
    if not any(anchor.at_end == at_end for anchor in _anchors(node)):
        return sequence([node, outside] if at_end else [outside, node])
    match node:
        case Anchor():
            return EMPTY
        case Sequence(parts):
            inner = list(parts if at_end else parts[::-1])
            while inner and isinstance(inner[-1], Anchor) and inner[-1].at_end == at_end:
                inner.pop()
                outside = EMPTY  # beyond an anchor is nothing
            if not inner:
                return EMPTY
            edge = _edge(inner.pop(), outside, at_end)
            return sequence([*inner, edge] if at_end else [edge, *inner[::-1]])
        case Either(branches):
            return either(_edge(branch, outside, at_end) for branch in branches)
        case Repeat(body, 0, 1):
            return either([_edge(body, outside, at_end), outside])
        case _:
            return node


def _anchors(node: Node) -> list[Anchor]:
    found: list[Anchor] = []
    stack = [node]
    while stack:
        match stack.pop():
            case Anchor() as anchor:
                found.append(anchor)
            case Sequence(parts) | Either(parts):
                stack += parts[::-1]
            case Repeat(body, _, _):
                stack.append(body)
            case Chars():
                pass
    return found
