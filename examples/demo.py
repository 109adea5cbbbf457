"""The whole way at once: eight sequences, six kinds of grammar, one processor, one killed service.

    make demo                        # or: python -m examples.demo

It starts the service as its own process, on a Unix socket and with masks in shared memory; builds a
small transformers model with random weights over a real tokenizer of 129,280 tokens; and lets it
decode in one `generate` call through one shared logits processor. In the middle the service is
killed with SIGKILL and started again, while generation goes on. Validators that aren't ours judge
the outputs; unless every one is complete and valid, the exit status is 1.
"""

import argparse
import os
import signal
import sys
import time
from typing import Any, cast

import torch
from transformers import StoppingCriteria

from engine_client import GrammarClient, Vocabulary
from engine_client.transformers import GrammarLogitsProcessor
from examples.demo_cases import Case, cases
from examples.demo_model import ForwardTimes, TimedProcessor, encode, small_model, tokenizer_path
from examples.demo_report import Output, Times, report, say
from examples.demo_service import ENDING_SIGNALS, Service

_MAX_NEW_TOKENS = 160
_STEP_TIMEOUT = 30.0
"""Seconds: more than the service takes to start again."""


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples")
    parser.add_argument("--kill-after", type=int, default=12, help="steps before the SIGKILL")
    arguments = parser.parse_args()
    # However it is ended, it ends the service and removes its directories.
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with Service() as service:
        return run(service, arguments.seed, arguments.kill_after)


def run(service: Service, seed: int, kill_after: int) -> int:
    """Starts everything, decodes once, and reports; returns the exit status."""
    say("starting the service, and building a model meanwhile")
    service.launch()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # the service needs a core, too
    path, asked = tokenizer_path(), cases()
    vocabulary = Vocabulary.from_path(path)
    model = small_model(vocabulary, seed)
    prompts = encode(path, [case.prompt for case in asked])
    service.wait_ready()
    say(f"the service listens on {service.target}, masks in {service.region_dir}")

    with GrammarClient(
        service.target, region_dir=service.region_dir, step_timeout=_STEP_TIMEOUT
    ) as client:
        begin = time.perf_counter()
        grammars = [client.compile(case.spec, vocabulary) for case in asked]
        say(f"{len(grammars)} grammars compiled in {time.perf_counter() - begin:.1f} s")

        processor = GrammarLogitsProcessor(client)
        timed, forward = TimedProcessor(processor), ForwardTimes(model)
        stops = model.generation_config.eos_token_id
        with processor.batch(grammars, stop_token_ids=stops) as batch:
            sequences = cast(Any, model).generate(
                **prompts,
                logits_processor=[timed],
                stopping_criteria=[KillAfter(service, kill_after)],
                max_new_tokens=_MAX_NEW_TOKENS,
                do_sample=True,
                top_k=0,
            )
        counts = client.stats.snapshot()

    start = prompts["input_ids"].shape[1]
    outputs = [
        judge(case, tokens, vocabulary)
        for case, tokens in zip(asked, sequences[:, start:].tolist(), strict=True)
    ]
    times = Times(timed.seconds, forward.seconds, kill_after)
    return 0 if report(outputs, batch.problems, times, counts) else 1


class KillAfter(StoppingCriteria):
    """Kills the service after so many steps and starts it again; never stops a sequence."""

    def __init__(self, service: Service, steps: int) -> None:
        self._service = service
        self._left = steps

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.BoolTensor:
        self._left -= 1
        if self._left == 0:
            number = self._service.kill()
            say(f"the service, process {number}, is killed with SIGKILL, and starts again")
            self._service.launch()
        return cast(torch.BoolTensor, torch.zeros(len(input_ids), dtype=torch.bool))


def judge(case: Case, tokens: list[int], vocabulary: Vocabulary) -> Output:
    """The text of what was generated, and what the validator says of it."""
    [end] = vocabulary.stop_token_ids
    complete = end in tokens
    written = tokens[: tokens.index(end)] if complete else tokens
    text = b"".join(vocabulary.tokens[token] for token in written).decode(errors="replace")
    return Output(case, text, len(written), complete, case.accepts(text))


if __name__ == "__main__":
    sys.exit(main())
