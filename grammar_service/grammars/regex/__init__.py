"""Regular expressions, read once for all backends, so that they mean the same with each.

tree = read(pattern)                # what it matches as a whole
tree = read(pattern, search=True)   # what has a match in it, as a JSON schema's `pattern` means it
write(tree)                         # an expression that every library reads alike
"""

from functools import lru_cache

from grammar_service.grammars.regex.anchors import resolve
from grammar_service.grammars.regex.parser import Irregular, Malformed, RegexError, parse
from grammar_service.grammars.regex.tree import ANYTHING, NOTHING, Node
from grammar_service.grammars.regex.writer import in_json, write

__all__ = [
    "read", "Node", "ANYTHING", "NOTHING",
    "write", "in_json",
    "RegexError", "Malformed", "Irregular",
]  # fmt: skip


@lru_cache(maxsize=1024)
def read(source: str, search: bool = False) -> Node:
    """The tree of the texts that an expression matches. Raises RegexError."""
    return resolve(parse(source), search)
