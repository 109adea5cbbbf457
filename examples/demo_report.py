"""What the demo prints."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine_client.transformers import Problem
from examples.demo_cases import Case

_console = Console(highlight=False)
if not _console.is_terminal:
    _console = Console(highlight=False, width=120)


class Output(NamedTuple):
    """One decoded sequence."""

    case: Case
    text: str
    tokens: int
    complete: bool
    valid: bool


class Times(NamedTuple):
    """Seconds of each step, and after how many of them the service was killed."""

    processor: Sequence[float]
    forward: Sequence[float]
    killed_after: int


def say(message: str) -> None:
    """Prints a line of progress."""
    _console.print(f"[dim]·[/dim] {message}", soft_wrap=True)


def report(
    outputs: Sequence[Output],
    problems: Sequence[Problem],
    times: Times,
    counts: Mapping[str, int],
) -> bool:
    """Prints the outputs, the times and the counts; returns whether all is well."""
    _console.print(_outputs(outputs))
    _console.print(_times(times))
    _console.print("the client counted: " + ", ".join(f"{v} {k}" for k, v in counts.items()))
    for problem in problems:
        _console.print(
            f"row {problem.row}: {problem.outcome.name} {problem.reason}: {problem.message}",
            style="red",
        )
    good = sum(output.complete and output.valid for output in outputs)
    well = good == len(outputs) and not problems
    if len(times.processor) <= times.killed_after:
        _console.print(
            f"the service wasn't killed: there were {len(times.processor)} steps", style="red"
        )
        well = False
    _console.print(
        f"{good} of {len(outputs)} outputs are complete and valid", style="green" if well else "red"
    )
    return well


def _outputs(outputs: Sequence[Output]) -> Table:
    table = Table(title="what the random weights wrote", show_lines=True, title_justify="left")
    table.add_column("grammar", ratio=4, overflow="fold")
    table.add_column("output", ratio=4, overflow="fold")
    table.add_column("tokens", justify="right")
    table.add_column("judged by")
    for output in outputs:
        verdict = Text("valid", "green") if output.valid else Text("not valid", "red")
        if not output.complete:
            verdict.append(", not complete", "red")
        grammar = Text.assemble((f"{output.case.spec.type} ", "bold"), output.case.grammar)
        judged = Text.assemble(output.case.judge, ":\n", verdict)
        table.add_row(grammar, Text(output.text), str(output.tokens), judged)
    return table


def _times(times: Times) -> Table:
    """Times of a step, the recovering one apart."""
    table = Table(title="milliseconds a step", title_justify="left")
    for name in ("", "steps", "median", "p99", "max"):
        table.add_column(name, justify="right" if name else "left")
    killed = times.killed_after
    recovering = times.processor[killed : killed + 1]
    steady = [*times.processor[:killed], *times.processor[killed + 1 :]]
    for name, seconds in (
        ("processor, in the engine's thread", steady),
        ("forward pass", times.forward),
        ("processor, the step after the SIGKILL", recovering),
    ):
        table.add_row(name, str(len(seconds)), *map(_milliseconds, _summary(seconds)))
    return table


def _summary(seconds: Sequence[float]) -> tuple[float, ...]:
    """Median, 99th percentile (nearest rank) and maximum; nothing for none."""
    if not seconds:
        return ()
    ranked = sorted(seconds)
    return statistics.median(ranked), ranked[-(-99 * len(ranked) // 100) - 1], ranked[-1]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"
