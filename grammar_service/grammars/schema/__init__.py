"""JSON schemas: what is one, what it means, and which library enforces all of it.

dialect = check(schema)
rewritten = rewrite(schema, dialect)
for candidate in candidates(rewritten):
    if not candidate.unenforced:
        ...  # compile one of candidate.schemas with candidate.backend; on a refusal take the next
"""

from grammar_service.grammars.schema.any_order import Rules
from grammar_service.grammars.schema.check import Limits, check
from grammar_service.grammars.schema.enforcement import (
    BACKENDS,
    refusal,
    unenforced,
    unenforced_formats,
)
from grammar_service.grammars.schema.forms import forms, llguidance_overrides
from grammar_service.grammars.schema.normalise import normalise
from grammar_service.grammars.schema.rewrite import Rewritten, rewrite
from grammar_service.grammars.schema.select import Candidate, candidates

__all__ = [
    "check", "Limits",
    "normalise",
    "rewrite", "Rewritten",
    "candidates", "Candidate", "BACKENDS",
    "unenforced", "unenforced_formats", "refusal",
    "forms", "Rules", "llguidance_overrides",
]  # fmt: skip
