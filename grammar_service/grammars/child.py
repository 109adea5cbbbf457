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
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_client.vocabulary import Vocabulary

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
    from grammar_service.errors import Invalid
    from grammar_service.grammars.plan import make

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
        spec, tokenizer_id, limits = arguments
        if tokenizer_id not in vocabularies:
            connection.send_bytes(json.dumps({"need": tokenizer_id}).encode())
            continue
        vocabularies.move_to_end(tokenizer_id)
        while len(vocabularies) > _KEPT_VOCABULARIES:
            vocabularies.popitem(last=False)
        started = time.perf_counter()
        try:
            made = make(spec, vocabularies[tokenizer_id], backends, limits)
        except Invalid as error:
            refusal = {
                "reason": error.reason,
                "message": error.message[:4000],
                "unenforced": error.unenforced[:1000],
            }
            connection.send_bytes(json.dumps(refusal).encode())
            continue
        answer = {
            "compile_ms": (time.perf_counter() - started) * 1000,
            "backend": made.backend,
            "source": made.form.source,
            "unenforced": made.unenforced,
            "annotations": made.annotations,
        }
        connection.send_bytes(json.dumps(answer).encode())
        connection.send_bytes(made.data)


if __name__ == "__main__":
    main()
