"""What `auto` tries, in order: the same on every replica, since nothing but the schema decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grammar_service.errors import Unenforced
from grammar_service.grammars.schema.enforcement import BACKENDS, unenforced, unenforced_formats
from grammar_service.grammars.schema.forms import forms
from grammar_service.grammars.schema.rewrite import Rewritten


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library for a schema.

    Attributes:
        backend: Its name.
        schemas: The schema in the forms for this library: the first that it doesn't refuse counts.
        unenforced: The keywords that its masks wouldn't enforce.
        annotations: The formats that they wouldn't.
    """

    backend: str
    schemas: tuple[Any, ...]
    unenforced: tuple[Unenforced, ...]
    annotations: tuple[Unenforced, ...]


def candidates(
    rewritten: Rewritten,
    backends: Sequence[str] = BACKENDS,
    strict_formats: bool = False,
    fixed_order: bool = False,
) -> list[Candidate]:
    """The libraries for a schema: first those that enforce all of it, in the order given.

    Those that don't follow, the fewest unenforced keywords first, for the refusal's list or for a
    caller that takes what is left upon itself.

    Args:
        rewritten: The schema.
        backends: Names of libraries, the preferred first.
        strict_formats: Formats that aren't enforced count as unenforced.
        fixed_order: Whether keys come in one order only; see `forms`.
    """
    found = []
    for backend in backends:
        missing = unenforced(rewritten, backend)
        formats = unenforced_formats(rewritten, backend)
        found.append(
            Candidate(
                backend=backend,
                schemas=tuple(forms(rewritten.schema, backend, fixed_order)),
                unenforced=tuple(missing + formats if strict_formats else missing),
                annotations=tuple(formats),
            )
        )
    return sorted(found, key=lambda candidate: len(candidate.unenforced))
