"""The same requests in a vLLM of its own process, with or without the service, as JSON lines.

python -m tests.vllm.own_backend MODEL_DIRECTORY
"""

import json
import sys
from typing import Any

REQUESTS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
              "required": ["a", "b"], "additionalProperties": False}},
    {"json": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
              "minItems": 1, "maxItems": 3}},
    {"regex": "[a-c]{3,6}x"},
    {"choice": ["red", "green", "gre"]},
    {"grammar": 'root ::= "x" | "(" root ")"'},
]  # fmt: skip
SEEDS = 4


def main() -> None:
    """Prints index, text and finish reason of each completion."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        model=sys.argv[1],
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
    )
    indices = [index for index in range(len(REQUESTS)) for _ in range(SEEDS)]
    sampled = [
        SamplingParams(
            max_tokens=200,
            temperature=1.0,
            seed=number,
            structured_outputs=StructuredOutputsParams(**REQUESTS[index]),
        )
        for number, index in enumerate(indices)
    ]
    for index, output in zip(indices, llm.generate(["hello"] * len(indices), sampled), strict=True):
        completion = output.outputs[0]
        sys.stdout.write(json.dumps([index, completion.text, completion.finish_reason]) + "\n")


if __name__ == "__main__":
    main()
