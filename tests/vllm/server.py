"""VLLM's OpenAI server beside a service, each its own process; and how tests ask it."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import jsonschema
import openai
import psutil

from tests.support import ServiceProcess, free_port, running_service

START_SECONDS = 300.0
"""A minute where nothing else runs."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
"""Small enough for a model of random weights to come to its end."""


class Served:
    """vLLM's OpenAI server on a free port of 127.0.0.1, and the service that it uses.

    Args:
        model: The directory of a tiny model.
        service: Where its masks come from.
        options: More arguments of the server.
        settings: Those of `engine_client.vllm.settings`, by name.
    """

    def __init__(
        self, model: Path, service: ServiceProcess, *options: str, **settings: str
    ) -> None:
        self.service = service
        self._port = free_port()
        self._log = tempfile.NamedTemporaryFile(prefix="vllm-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "tiny", "--load-format", "dummy"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--dtype", "bfloat16"]
        command += ["--enforce-eager", "--max-model-len", "1536", "--max-num-seqs", "16", *options]
        environment = {f"GRAMMAR_CLIENT_{name.upper()}": value for name, value in settings.items()}
        environment["GRAMMAR_CLIENT_TARGET"] = service.target
        environment["GRAMMAR_CLIENT_REGION_DIR"] = str(service.region_dir)
        self._process = subprocess.Popen(
            command, env=os.environ | environment, stdout=self._log, stderr=subprocess.STDOUT
        )
        self.openai = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self._port}/v1", api_key="-", timeout=300, max_retries=0
        )

    def wait_ready(self) -> Self:
        """Waits until it serves."""
        end = time.monotonic() + START_SECONDS
        while not self.healthy():
            assert self._process.poll() is None, f"vLLM ended: {self.log[-4000:]}"
            assert time.monotonic() < end, f"vLLM doesn't start: {self.log[-4000:]}"
            time.sleep(0.1)
        return self

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return Path(self._log.name).read_text(errors="replace")

    def healthy(self) -> bool:
        """Whether it serves, which takes a living engine."""
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, prompt: str = "hello", **parameters: Any) -> Any:
        """A chat completion, with OpenAI's parameters and vLLM's own; a stream with `stream`."""
        sampling = {"temperature": 1.0, "seed": 0, "max_tokens": 400}
        own = {name: parameters.pop(name) for name in VLLMS_OWN & parameters.keys()}
        return self.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            extra_body=own,
            **(sampling | parameters),
        )

    def serves(self, **parameters: Any) -> bool:
        """Whether it takes the next request."""
        return bool(self.ask(max_tokens=5, **parameters).choices[0].finish_reason)

    def close(self) -> None:
        """Ends it and its engine, by force if need be."""
        self.openai.close()
        engines = []
        if self._process.poll() is None:
            engines = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        for engine in psutil.wait_procs(engines, timeout=10)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()
        self._log.close()


VLLMS_OWN = frozenset({"structured_outputs", "chat_template_kwargs", "return_token_ids"})
"""Parameters of a request that OpenAI's client doesn't know."""


@contextlib.contextmanager
def serving(model: Path, flags: list[str], options: list[str], **settings: str) -> Iterator[Served]:
    """A service with those flags and a server with those options; both survive what is done."""
    with running_service(*flags, metrics=True) as service:
        served = Served(model, service, *options, **settings)
        try:
            yield served.wait_ready()
            assert served.healthy(), served.log[-8000:]
        finally:
            served.close()


@contextlib.contextmanager
def gone(service: ServiceProcess) -> Iterator[None]:
    """Inside, the service is killed and stays so."""
    service.kill()
    try:
        yield
    finally:
        service.start()


@contextlib.contextmanager
def frozen(service: ServiceProcess) -> Iterator[None]:
    """Inside, the service is there and doesn't move."""
    service.freeze()
    try:
        yield
    finally:
        service.signal(signal.SIGCONT)


def by_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The parameter that asks for JSON of a schema, as OpenAI has it."""
    json_schema = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def constrained(**constraint: Any) -> dict[str, Any]:
    """The parameter that asks for a constraint, as vLLM has it."""
    return {"structured_outputs": constraint}


def letters(count: int) -> dict[str, Any]:
    """What asks for so many letters: at 2 ms each, and more on a busy machine, a long stream."""
    return {"max_tokens": count + 1, **constrained(regex=f"[a-f]{{{count}}}")}


def is_valid(text: str | None, schema: dict[str, Any] = SCHEMA) -> bool:
    """True for JSON of a schema; anything else raises what is wrong."""
    jsonschema.validate(json.loads(text or ""), schema)
    return True


def text_of(answer: Any) -> str:
    """The text of a completion that came to its end."""
    [choice] = answer.choices
    assert choice.finish_reason == "stop", choice
    return str(choice.message.content)


def read(stream: Any, chunks: int | None = None) -> str:
    """The text of a stream's next chunks, or of all that are left."""
    return "".join(
        chunk.choices[0].delta.content or "" for chunk in itertools.islice(stream, chunks)
    )
