"""Backends: one module a grammar library, behind the small interface in `base`."""

from grammar_service.backends.base import Backend

__all__ = ["NAMES", "Backend", "create"]

NAMES: tuple[str, ...] = ("xgrammar", "llguidance", "outlines")


def create(name: str, threads: int) -> Backend:
    """The backend of that name; it may fill masks with so many threads. Imports its library."""
    match name:
        case "xgrammar":
            from grammar_service.backends.xgrammar import XGrammarBackend

            return XGrammarBackend(threads)
        case "llguidance":
            from grammar_service.backends.llguidance import LLGuidanceBackend

            return LLGuidanceBackend(threads)
        case "outlines":
            from grammar_service.backends.outlines import OutlinesBackend

            return OutlinesBackend(threads)
        case _:
            raise ValueError(f"no backend is called {name!r}")
