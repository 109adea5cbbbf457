"""The grammar service's client: what runs in an engine's process. Nothing here holds grammar state.

    from engine_client import GrammarClient, GrammarSpec, Row, Vocabulary

    vocabulary = Vocabulary.from_huggingface(tokenizer, width=model.config.vocab_size)
    client = GrammarClient("unix:/run/grammar.sock", region_dir="/dev/shm/grammar")
    grammar = client.compile(GrammarSpec.json_schema(schema), vocabulary)
    row = Row("request-1", grammar, output_tokens, position=len(output_tokens) - 1)
    step = client.submit([row])
    logits = model(...)                      # the forward pass goes on meanwhile
    result = client.collect(step)            # result.masks: int32[rows, words]

Importing it takes neither torch nor xgrammar nor transformers; they are imported where they are
first needed.
"""

from engine_client.client import GrammarClient
from engine_client.errors import (
    ClientError,
    Refused,
    ServiceError,
    Unenforced,
    Unreachable,
    UsageError,
)
from engine_client.pending import PendingStep
from engine_client.spec import GrammarSpec, GrammarType
from engine_client.stats import Stats
from engine_client.types import Grammar, Note, Outcome, Policy, Row, StepResult
from engine_client.vocabulary import Vocabulary

__all__ = [
    "ClientError",
    "Grammar",
    "GrammarClient",
    "GrammarSpec",
    "GrammarType",
    "Note",
    "Outcome",
    "PendingStep",
    "Policy",
    "Refused",
    "Row",
    "ServiceError",
    "Stats",
    "StepResult",
    "Unenforced",
    "Unreachable",
    "UsageError",
    "Vocabulary",
]
