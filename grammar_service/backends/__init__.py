"""Backends: one module a grammar library, behind the small interface in `base`."""

from grammar_service.backends.base import Backend

__all__ = ["NAMES", "Backend", "create"]

NAMES = ("xgrammar",)


def create(name: str, threads: int) -> Backend:
    """The backend of that name; it may fill masks with so many threads. Imports its library."""
    from grammar_service.backends.xgrammar import XGrammarBackend

    return {"xgrammar": XGrammarBackend}[name](threads)
