"""Expressions for the names of properties."""

import re

MOST_NAMES = 200
"""In one expression."""
_PLAIN_NAME = re.compile(r"^[^\x00-\x1f\x7f]{1,64}$")
"""Names that fit into an expression; it is as deep as they are long."""


def fit(names: list[str]) -> bool:
    """Whether an expression can have these names."""
    return len(names) <= MOST_NAMES and all(_PLAIN_NAME.match(name) for name in names)


def just(name: str) -> str:
    """An expression for one name."""
    return f"^{_escaped(name)}$"


def other_than(names: list[str]) -> str:
    """An expression for every name but some."""
    return f"^{_other_than(frozenset(names))}$"


def _other_than(words: frozenset[str]) -> str:
    """An expression for every text but some, which are none of them empty at the first call."""
    if not words:
        return "(?s:.*)"
    starts: dict[str, set[str]] = {}
    for word in words:
        if word:
            starts.setdefault(word[0], set()).add(word[1:])
    branches = [_escaped(first) + _other_than(frozenset(starts[first])) for first in sorted(starts)]
    others = "".join(map(_escaped, sorted(starts)))
    branches.append(f"[^{others}](?s:.*)" if others else "(?s:.+)")
    return f"(?:{'|'.join(branches)})" + ("" if "" in words else "?")


def _escaped(text: str) -> str:
    return re.sub(r"[][\\^$.|?*+(){}/&~#-]", r"\\\g<0>", text)
