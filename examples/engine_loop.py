"""A decoding loop over the client, as an engine has one; the model is a random number generator.

python -m examples.engine_loop unix:/tmp/grammar-service.sock
"""

import os
import sys
import uuid
from dataclasses import dataclass, field

import torch
import xgrammar

from engine_client import Grammar, GrammarClient, GrammarSpec, Row, Vocabulary

# Printable ASCII, a token a character, and a stop token: 96 columns. With a width that 32 does not
# divide, xgrammar's kernel for CPU (0.2.9) writes past a row in which all tokens are allowed.
TOKENS = [bytes([code]) for code in range(32, 127)] + [b"<end>"]
END = len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, len(TOKENS), stop_token_ids=(END,), special_token_ids=(END,))
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string", "maxLength": 6}, "paid": {"type": "boolean"}},
    "required": ["id", "paid"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec.json_schema(SCHEMA, max_whitespace=0),
    GrammarSpec.regex("[A-Z]{2}-[0-9]{4}"),
    GrammarSpec.choice(["approved", "declined"]),
]


@dataclass
class Request:
    """What an engine knows of a sequence."""

    grammar: Grammar
    tokens: list[int] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


def main(target: str) -> None:
    """Decodes two sequences of each grammar at once, and prints their texts."""
    generator = torch.Generator().manual_seed(0)
    with GrammarClient(target) as client:
        requests = [Request(client.compile(spec, VOCABULARY)) for spec in SPECS for _ in range(2)]
        running = requests
        while running:
            # One token is new since the last step; position 0 would send all, and be right too.
            rows = [Row(r.id, r.grammar, r.tokens, max(0, len(r.tokens) - 1)) for r in running]
            step = client.submit(rows)  # the service makes the masks while the model computes
            logits = torch.randn(len(rows), len(TOKENS), generator=generator)
            result = client.collect(step)  # never raises for what the service does
            xgrammar.apply_token_bitmask_inplace(logits, result.masks)
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            for request, token in zip(running, tokens.flatten().tolist(), strict=True):
                request.tokens.append(token)
            for index, note in result.notes.items():  # such a row gets stop tokens only
                print(f"request {running[index].id}: {note.reason}: {note.message}")
            running = [request for request in running if request.tokens[-1] != END]
        client.close_sequences([request.id for request in requests])
    for request in requests:
        text = b"".join(TOKENS[token] for token in request.tokens[:-1]).decode()
        print(f"{request.grammar.spec.type:12} {text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ["GRAMMAR_SERVICE_TARGET"])
