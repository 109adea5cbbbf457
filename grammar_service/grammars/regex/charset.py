r"""Sets of characters as ranges of code points, and those that ECMAScript's expressions name.

Surrogates are in none: no text in UTF-8 has them.
"""

import sys
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby

Ranges = tuple[tuple[int, int], ...]
"""Ascending, with gaps in between; both ends belong to a range."""

_SURROGATES = (0xD800, 0xDFFF)
_LAST_CASED = 0x1E943
"""After it no character has another case."""
_LONG_NAMES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Number": "N",
    "Decimal_Number": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z",
    "Space_Separator": "Zs", "Other": "C", "Control": "Cc",
}  # fmt: skip


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The set of all characters of the ranges, in whatever order they come."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, start = [], 0
    for low, high in union([*ranges, _SURROGATES]):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= sys.maxunicode:
        found.append((start, sys.maxunicode))
    return tuple(found)


def intersection(first: Ranges, second: Ranges) -> Ranges:
    """The characters in both."""
    return complement(union([*complement(first), *complement(second)]))


def contains(ranges: Ranges, character: int) -> bool:
    """Whether the set has a character."""
    return any(low <= character <= high for low, high in ranges)


def category(name: str) -> Ranges | None:
    r"""The characters of `\p{name}`: a general category, Any or ASCII. None for what isn't one."""
    name = name.removeprefix("General_Category=").removeprefix("gc=")
    name = _LONG_NAMES.get(name, name)
    if name in ("Any", "ASCII"):
        return ALL if name == "Any" else ((0, 127),)
    known = [key for key in _categories() if key == name or key[:1] == name]
    return union(pair for key in known for pair in _categories()[key]) if known else None


@lru_cache(maxsize=1024)
def insensitive(ranges: Ranges) -> Ranges:
    """The set with each character's other cases, by Unicode's simple folding."""
    cases = [case for case in _cases() if any(contains(ranges, c) for c in case)]
    return union([*ranges, *((c, c) for case in cases for c in case)])


@lru_cache(maxsize=1)
def _categories() -> dict[str, Ranges]:
    found: dict[str, list[tuple[int, int]]] = {}
    characters = range(sys.maxunicode + 1)
    for name, group in groupby(characters, lambda c: unicodedata.category(chr(c))):
        first, *rest = group
        found.setdefault(name, []).append((first, rest[-1] if rest else first))
    del found["Cs"]
    return {name: tuple(ranges) for name, ranges in found.items()}


@lru_cache(maxsize=1)
def _cases() -> list[list[int]]:
    """The groups of characters that differ by case only."""
    groups: dict[str, list[int]] = {}
    for c in range(_LAST_CASED + 1):
        folded = chr(c).casefold()
        groups.setdefault(folded if len(folded) == 1 else chr(c).lower(), []).append(c)
    return [group for group in groups.values() if len(group) > 1]


ALL = complement(())
DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
NAMED = {
    "d": DIGIT, "D": complement(DIGIT), "w": WORD, "W": complement(WORD),
    "s": SPACE, "S": complement(SPACE),
}  # fmt: skip
r"""By the letter of their escape (`\d`)."""
