"""The worker of a check: its own process, with a real server and client, killed when it hangs.

The supervisor sends the places of cases in the cases file, [[number, offset], ...]; the worker says
where it is with each, {"compiling": number}, {"stepping": number}, and {"finished": number,
"report": ...} in the end. Cases themselves aren't sent, so that the supervisor never waits for a
worker that doesn't read.
"""

import ctypes
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Any

from engine_client import GrammarClient, GrammarSpec, Refused, ServiceError, UsageError, Vocabulary
from grammar_service.backends import NAMES
from grammar_service.check.cases import Plan, read_case, refused
from grammar_service.check.spelling import Speller
from grammar_service.check.stepping import PreparedCase, Stepping
from grammar_service.server.app import GrammarServer
from grammar_service.server.log import configure
from grammar_service.settings import ServiceSettings

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 60.0
"""The supervisor's deadline comes first; the client's are later by this."""


class Worker:
    """Compiles the cases ahead in threads, and steps them in one.

    Making and starting one raises OSError, RuntimeError, ValueError or ServiceError.
    """

    def __init__(self, plan: Plan, connection: Connection) -> None:
        self._plan = plan
        self._connection = connection
        self._sending = threading.Lock()
        self._vocabulary = _with_end(Vocabulary.from_path(plan.tokenizer, width=plan.width))
        self._speller = Speller(plan.tokenizer, self._vocabulary)
        self._server = GrammarServer(_settings(plan))
        self._client = GrammarClient(
            self._server.target,
            region_dir=plan.region_dir,
            step_timeout=plan.timeout + _GRACE_SECONDS,
            timeout=plan.timeout + _GRACE_SECONDS,
        )
        self._places: SimpleQueue[tuple[int, int]] = SimpleQueue()
        # Bounded: what lies here is compiled, and takes memory.
        self._prepared: Queue[PreparedCase] = Queue(2 * plan.jobs)
        self._stepping = Stepping(self._client, self._prepared, self._send)

    def start(self) -> None:
        """Starts the server; waits for its compile children, so that no case pays for them."""
        self._server.start()
        self._client.register_tokenizer(self._vocabulary)
        jobs = self._plan.jobs
        specs = [GrammarSpec.regex("a" * (1 + job)) for job in range(jobs)]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self._client.compile, specs, [self._vocabulary] * jobs))

    def run(self) -> None:
        """Takes cases until the supervisor closes the connection."""
        threading.Thread(target=self._stepping.run, daemon=True).start()
        for _ in range(self._plan.jobs):
            threading.Thread(target=self._prepare, daemon=True).start()
        try:
            while True:
                for number, offset in json.loads(self._connection.recv_bytes()):
                    self._places.put((number, offset))
        except EOFError:
            self._client.close()
            self._server.stop()

    def _prepare(self) -> None:
        """One thread: compiles one case after the other."""
        with open(self._plan.cases, "rb") as cases:
            while True:
                number, offset = self._places.get()
                self._send({"compiling": number})
                cases.seek(offset)
                self._compile(number, cases.readline())

    def _compile(self, number: int, line: bytes) -> None:
        case = read_case(line)
        try:
            grammar = self._client.compile(case.spec, self._vocabulary)
        except Refused as error:
            report = refused(case.id, error.reason, error.message, error.unenforced)
        except ServiceError as error:
            report = refused(case.id, "SERVICE_UNREACHABLE", str(error))
        except UsageError as error:
            # Either a backend that the client doesn't know, or what the contract can't carry.
            known = case.spec.backend in ("auto", *NAMES)
            report = refused(case.id, "SPEC_INVALID" if known else "SPEC_UNSUPPORTED", str(error))
        else:
            tokens = [self._speller.spell(text) for text in case.texts]
            self._prepared.put(PreparedCase(number, case.id, grammar, tokens))
            return
        self._send({"finished": number, "report": report})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._sending:
            self._connection.send_bytes(data)


def _settings(plan: Plan) -> ServiceSettings:
    """The service's own settings, with limits from the environment as in `serve`."""
    settings = ServiceSettings(
        listen=f"unix:{Path(plan.directory, 'service.sock')}",
        region_dir=Path(plan.region_dir),
        tokenizers=[],
        metrics_port=0,
        compile_workers=plan.jobs,
        grace_seconds=1.0,
    )
    limits = {
        "compile_seconds": min(settings.compile_seconds, plan.timeout),
        "compile_queue": max(settings.compile_queue, 2 * plan.jobs),
    }
    return settings.model_copy(update=limits)


def _with_end(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary; one more token is its end if the tokenizer doesn't say how a text ends."""
    if vocabulary.stop_token_ids:
        return vocabulary
    end = len(vocabulary.tokens)
    return Vocabulary(
        tokens=[*vocabulary.tokens, b"<end>"],
        width=max(vocabulary.width, end + 1),
        stop_token_ids=(end,),
        special_token_ids=(*vocabulary.special_token_ids, end),
    )


def _die(args: threading.ExceptHookArgs) -> None:
    """A thread that ends takes the process along: the supervisor goes on from there."""
    threading.__excepthook__(args)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Serves one supervisor, over the socket of the given descriptor."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.excepthook = _die
    connection = Connection(int(sys.argv[1]))
    try:
        plan = Plan(**json.loads(connection.recv_bytes()))
        configure("warning", "console")
        worker = Worker(plan, connection)
        worker.start()
    except (OSError, RuntimeError, ValueError, ServiceError) as error:
        connection.send_bytes(json.dumps({"error": str(error)}).encode())
        return
    connection.send_bytes(json.dumps({"ready": True}).encode())
    worker.run()


if __name__ == "__main__":
    main()
