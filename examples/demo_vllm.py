"""vLLM's own server on the service: a stream of JSON, speculation on, the service killed meanwhile.

    make demo-vllm                   # or: .venv-vllm/bin/python -m examples.demo_vllm

It starts the service, by the interpreter of its own environment, and vLLM's OpenAI server with a
tiny model of random weights and ngram drafts; asks for a chat completion with a JSON schema; and
while that is streamed, kills the service with SIGKILL and starts it again. The exit status is 0 if
the new service went on with the stream and the whole text is valid.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

import jsonschema
import openai

from examples.demo_service import ENDING_SIGNALS, Service
from examples.tiny_model import build

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{3,12}$"},
        "born": {"type": "integer", "minimum": 1900, "maximum": 1999},
        "knows": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "language": {"enum": ["Ada", "Fortran", "Lisp"]},
                    "since": {"type": "string", "format": "date"},
                },
                "required": ["language", "since"],
                "additionalProperties": False,
            },
            "minItems": 3,
            "maxItems": 5,
        },
        "active": {"type": "boolean"},
    },
    "required": ["name", "born", "knows", "active"],
    "additionalProperties": False,
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
LAYERS = 24
"""Slow enough for a stream to be under way for a while."""
KILL_AFTER = 12
"""Chunks of the stream."""
START_SECONDS = 600
_PYTHON = os.environ.get(
    "GRAMMAR_SERVICE_PYTHON", str(Path(__file__).parents[1] / ".venv/bin/python")
)
"""It has the service; this environment has vLLM and the client."""


def main() -> int:
    """Runs the demo; returns the exit status."""
    # However it is ended, it ends both servers and removes their files.
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    metrics = free_port()
    os.environ["GRAMMAR_SERVICE_METRICS_PORT"] = str(metrics)
    with (
        tempfile.TemporaryDirectory(prefix="grammar-demo-") as directory,
        Service(_PYTHON) as service,
    ):
        say("starting the service and vLLM's server, which takes a minute or two")
        service.launch()
        model = build(Path(directory) / "model", LAYERS)
        service.wait_ready()
        with VllmServer(model, service, Path(directory) / "vllm.log") as server:
            server.wait_ready()
            say(f"vLLM serves on port {server.port}; its masks come from {service.target}")
            return run(service, server, metrics)


def run(service: Service, server: "VllmServer", metrics: int) -> int:
    """Streams one completion through a crash of the service, and reports."""
    stream = server.ask()
    before = read(stream, KILL_AFTER)
    killed = counted(metrics)
    number = service.kill()
    say(f"the text when the service, process {number}, is killed with SIGKILL:")
    show(before)
    say("the service starts again; meanwhile vLLM's step waits for its masks")
    service.launch()
    try:
        after, pause = read_timed(stream)
    except openai.APIError as error:
        say(f"the stream ends with an error: {error}\n{server.log.read_text()[-4000:]}")
        return 1
    say(f"the text from there, after a pause of {pause:.1f} s:")
    show(after)
    healed = counted(metrics)
    report(killed, healed, counted(server.port), server.log.read_text())
    if not healed["grammar_steps_total"]:
        say("NOT SHOWN: the stream was over before the service was killed")
        return 1
    return judge(before + after)


def judge(text: str) -> int:
    """Whether the whole text is what was asked for: the exit status."""
    try:
        value = json.loads(text)
        jsonschema.validate(value, SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        say(f"NOT VALID: {error}")
        return 1
    say("valid by jsonschema, the whole of it:")
    print(json.dumps(value, indent=2))
    return 0


def report(
    killed: dict[str, float], healed: dict[str, float], vllm: dict[str, float], log: str
) -> None:
    """What was counted on either side of the crash."""
    say(
        f"steps: {killed['grammar_steps_total']:.0f} by the killed service until it was asked, "
        f"{healed['grammar_steps_total']:.0f} by the new one"
    )
    say(
        f"healed: {log.count('reconnecting')} reconnect, "
        f"{healed['grammar_compiles_total']:.0f} grammar compiled again, "
        f"{healed['grammar_sequences_opened_total']:.0f} sequence opened again with its history"
    )
    say(
        f"speculation: {vllm['vllm:generation_tokens_total']:.0f} tokens, of which "
        f"{vllm['vllm:spec_decode_num_accepted_tokens_total']:.0f} were drafts that the model and "
        "the grammar accepted"
    )


class VllmServer:
    """vLLM's OpenAI server as a process of its own. Leaving the `with` ends it."""

    def __init__(self, model: Path, service: Service, log: Path) -> None:
        self.port = free_port()
        self.log = log
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        self._command += ["--model", str(model), "--load-format", "dummy", "--dtype", "bfloat16"]
        self._command += ["--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--served-model-name", "tiny", "--speculative-config", json.dumps(NGRAM)]
        # Random weights would fill the text with white space.
        outputs = {"backend": "guidance", "disable_any_whitespace": True}
        self._command += ["--structured-outputs-config", json.dumps(outputs)]
        self._environment = os.environ | {
            "GRAMMAR_CLIENT_TARGET": service.target,
            "GRAMMAR_CLIENT_REGION_DIR": str(service.region_dir),
            # More than the service takes to start again, on a busy machine as well.
            "GRAMMAR_CLIENT_STEP_TIMEOUT": "120",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def wait_ready(self) -> None:
        """Waits until it serves. Raises RuntimeError."""
        end = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"vLLM doesn't start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def ask(self) -> Any:
        """A chat completion as a stream. At temperature 0: on a CPU, vLLM 0.32 samples wrong
        with drafts at others.
        """
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", timeout=300, max_retries=0
        )
        json_schema = {"name": "person", "schema": SCHEMA, "strict": True}
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Who was born when, and knows what?"}],
            response_format={"type": "json_schema", "json_schema": json_schema},
            temperature=0,
            max_tokens=500,
            stream=True,
        )

    def __enter__(self) -> Self:
        # A session of its own: Ctrl-C is the demo's to handle, and its engine ends with it.
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _healthy(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def read(stream: Any, chunks: int | None = None) -> str:
    """The text of a stream's next chunks, or of all that are left."""
    pieces = (chunk.choices[0].delta.content or "" for chunk in itertools.islice(stream, chunks))
    return "".join(pieces)


def read_timed(stream: Any) -> tuple[str, float]:
    """The text that is left, and the longest wait for a chunk of it, in seconds."""
    text, pause = "", 0.0
    last = time.monotonic()
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        pause = max(pause, time.monotonic() - last)
        last = time.monotonic()
    return text, pause


def counted(port: int) -> dict[str, float]:
    """A server's metrics by name, each summed over its labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    counts: dict[str, float] = {}
    for name, value in (found.groups() for line in lines if (found := _METRIC.match(line))):
        counts[name] = counts.get(name, 0.0) + float(value)
    return counts


_METRIC = re.compile(r"([a-z_:]+)(?:\{.*\})? ([0-9.e+-]+)$")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def show(text: str) -> None:
    """Prints what the model wrote."""
    print(f"\n    {text}\n", flush=True)


def say(message: str) -> None:
    """Prints a line of progress."""
    print(f"· {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
