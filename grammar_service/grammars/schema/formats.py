"""Formats that llguidance lacks, as regular expressions that it can enforce.

Each admits only texts of the format. The one for `regex` admits less: groups nest twice at most,
and bounds and ranges are those whose order can be seen character by character.
"""

from typing import Any

_CHARACTER = r"[^\x00-\x1f\\.\[\](){}*+?|^$]"
_ESCAPE = r"\\[dDwWsSbBtnrfv.^$*+?()\[\]{}|/\\-]"
_CLASS_ESCAPE = r"\\[dDwWsStnrfv.^$*+?()\[\]{}|/\\-]"


def _ascending(characters: str, between: str) -> str:
    """Two of the characters, the first not after the second."""
    return "|".join(f"{first}{between}[{first}-{characters[-1]}]" for first in characters)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_RANGE = "|".join(_ascending(row, "-") for row in (_LETTERS, _LETTERS.upper(), "0123456789"))
_BOUNDS = (
    rf"\{{(?:[0-9]{{1,3}},?|{_ascending('0123456789', ',')}"
    r"|[0-9],[1-9][0-9]{1,2}|[1-9][0-9],[1-9][0-9]{2})\}"
)
_CLASS = rf"\[\^?(?:{_RANGE}|[^\x00-\x1f\\\[\]^&~|-]|{_CLASS_ESCAPE})+-?\]"
_ATOM = rf"(?:{_CHARACTER}|\.|{_ESCAPE}|{_CLASS})"


def _sequence(atom: str) -> str:
    return rf"\^?(?:{atom}(?:[*+?]\??|{_BOUNDS})?)*\$?"


def _alternatives(atom: str) -> str:
    return rf"{_sequence(atom)}(?:\|{_sequence(atom)})*"


_INNER = rf"(?:{_ATOM}|\((?:\?:)?{_alternatives(_ATOM)}\))"
_OUTER = rf"(?:{_ATOM}|\((?:\?:)?{_alternatives(_INNER)}\))"
_POINTER = r"(?:/(?:[^~/\x00-\x1f]|~[01])*)*"

PATTERNS = {
    "regex": f"^(?:{_alternatives(_OUTER)})$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
"""Regular expressions by format."""

OUTLINES_FORMATS = frozenset({"date-time", "date", "time", "email", "uuid", "uri"})
"""Those that outlines-core has; it refuses all others."""


def only_format(node: Any) -> bool:
    """Whether a node says a format and nothing else; in an `allOf` it is the second of a text."""
    return isinstance(node, dict) and node.keys() == {"format"}
