"""Random expressions of the dialect that Python's `re` reads alike over TEXT, and their masks."""

from functools import cache
from typing import Any

from hypothesis import strategies as st

from engine_client import GrammarSpec
from grammar_service.backends import Backend, create
from grammar_service.grammars.plan import plan
from grammar_service.grammars.schema import Limits
from tests.cases.test_schemas import BYTES

ALPHABET = 'ab1_ \n"\\é😀'
"""No line end but the line feed, and no white space but ASCII's: there the two differ."""
texts = st.text(ALPHABET, max_size=6)

_ATOMS = [
    *("a", "b", "1", "é", "😀", '"', r"\\", r"\n", r"\.", r"\x61", r"\u0062", "()", "."),
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"),
    *("[ab]", "[^a]", r"[^\n]", r"[\d_]", r"[^\w\s]", r"[a-bé]", r'["\\]', r"[\s\S]", "[😀-😂]"),
]  # fmt: skip
_QUANTIFIERS = ["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{1,}", "*?", "+?", "??", "{1,2}?"]


def _more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = inner.map("(?:{})".format) | inner.map("({})".format)
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda some: f"(?:{'|'.join(some)})"),
        st.tuples(group, st.sampled_from(_QUANTIFIERS)).map("".join),
        inner.map("(?:{}|)".format),
    )


_bodies = st.recursive(st.sampled_from(_ATOMS), _more, max_leaves=6)
_anchored = st.tuples(st.sampled_from(["", "^"]), _bodies, st.sampled_from(["", "$"])).map("".join)
expressions = st.lists(_anchored, min_size=1, max_size=2).map("|".join)


class Masks:
    """The texts that the masks of a backend admit for an expression."""

    def __init__(self, pattern: str, backend: str) -> None:
        (attempt,) = plan(GrammarSpec.regex(pattern, backend=backend), Limits()).attempts
        self._backend: Backend = _backend(backend)
        self._compiled: Any = self._backend.load(
            self._backend.compile(attempt.specs[0], BYTES), attempt.specs[0], BYTES
        )

    def accepts(self, text: str) -> bool:
        matcher = self._backend.matcher(self._compiled, BYTES.stop_token_ids)
        taken = all(self._backend.accept([matcher], [byte])[0] for byte in text.encode())
        return taken and self._backend.completed([matcher])[0]


@cache
def _backend(name: str) -> Backend:
    return create(name, threads=1)
