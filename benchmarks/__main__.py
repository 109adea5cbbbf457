"""`python -m benchmarks NAME [--json]`: every figure is a ratio of ours and a peer in one run."""

import argparse
import importlib.util
import json
import os
from collections.abc import Callable

from benchmarks import step, vllm_step

BENCHMARKS: dict[str, Callable[[], dict[str, object]]] = {"step": step.run}
if importlib.util.find_spec("vllm") is not None:
    # An environment of its own, in which the others' peers aren't pinned.
    BENCHMARKS = {"vllm": vllm_step.run}


def main() -> None:
    """Runs the named benchmarks, or all; prints one JSON line each."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", action="store_true", help="one JSON line each, nothing else")
    arguments = parser.parse_args()
    unknown = set(arguments.name) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    for name in arguments.name or BENCHMARKS:
        result = {"benchmark": name, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        result |= BENCHMARKS[name]()
        if arguments.json:
            print(json.dumps(result), flush=True)
        else:
            print(json.dumps(result, indent=2), flush=True)


if __name__ == "__main__":
    main()
