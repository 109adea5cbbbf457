"""A compile child: its own process, started by `children`, killed when a compile runs away.

It reads jobs from its parent over a socket and answers each with a JSON header and, when that says
so, an artifact. Nothing that it sends is unpickled.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_client.spec import GrammarSpec
    from engine_client.vocabulary import Vocabulary
    from grammar_service.backends import Backend
    from grammar_service.grammars.schema import Limits

_KEPT_VOCABULARIES = 4
_PR_SET_PDEATHSIG = 1
_PRIORITY = 10
"""Added to the process's niceness: steps go before compiles."""


def main() -> None:
    """Serves jobs until the parent closes the connection."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_PRIORITY)
    # After that, since they take seconds, in which the parent may die.
    from grammar_service.backends import create

    connection = Connection(int(sys.argv[1]))
    backends = {name: create(name, threads=1) for name in sys.argv[2].split(",")}
    vocabularies: OrderedDict[str, Vocabulary] = OrderedDict()
    connection.send_bytes(b"ready")
    while True:
        try:
            kind, *arguments = connection.recv()
        except EOFError:
            return
        if kind == "vocabulary":
            vocabulary = arguments[0]
            vocabularies[vocabulary.id] = vocabulary
            for backend in backends.values():
                backend.prepare(vocabulary)
            connection.send_bytes(b"{}")
            continue
        spec, tokenizer_id, limits, load_seconds = arguments
        if tokenizer_id not in vocabularies:
            connection.send_bytes(json.dumps({"need": tokenizer_id}).encode())
            continue
        vocabularies.move_to_end(tokenizer_id)
        while len(vocabularies) > _KEPT_VOCABULARIES:
            vocabularies.popitem(last=False)
        header, data = _compile(spec, vocabularies[tokenizer_id], backends, limits, load_seconds)
        connection.send_bytes(json.dumps(header).encode())
        if data is not None:
            connection.send_bytes(data)


def _compile(
    spec: "GrammarSpec",
    vocabulary: "Vocabulary",
    backends: "Mapping[str, Backend]",
    limits: "Limits",
    load_seconds: float,
) -> tuple[dict[str, Any], bytes | None]:
    """The answer to a job: a header, and the artifact if it isn't refused."""
    from grammar_service.errors import Invalid
    from grammar_service.grammars.plan import make

    started, busy = time.perf_counter(), time.process_time()
    try:
        made = make(spec, vocabulary, backends, limits)
    except Invalid as error:
        refusal = {
            "reason": error.reason,
            "message": error.message[:4000],
            "unenforced": error.unenforced[:1000],
        }
        return refusal, None
    except Exception as error:
        # A bug. The process is still good, and a new one would take the next compile seconds.
        # The error's text isn't told: it may quote the spec.
        trace = "".join(traceback.format_tb(error.__traceback__))
        return {"failed": type(error).__name__, "trace": trace[-8000:]}, None
    compile_ms = (time.perf_counter() - started) * 1000
    # Nothing takes longer to load than to compile, so most needn't be measured.
    if time.process_time() - busy > load_seconds:
        busy = time.process_time()
        backends[made.backend].load(made.data, made.form, vocabulary)
        busy = time.process_time() - busy
        if busy > load_seconds:
            return {"load_seconds": busy}, None
    header = {
        "compile_ms": compile_ms,
        "backend": made.backend,
        "source": made.form.source,
        "unenforced": made.unenforced,
        "annotations": made.annotations,
    }
    return header, made.data


if __name__ == "__main__":
    main()
