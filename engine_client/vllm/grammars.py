"""The client of one vLLM process: the model's vocabulary, and compiles that nobody waits for."""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from engine_client.client import GrammarClient
from engine_client.errors import ClientError, Unreachable
from engine_client.spec import GrammarSpec
from engine_client.types import Grammar
from engine_client.vllm.settings import EngineSettings
from engine_client.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_CLOSE_SECONDS = 2.0
_SWEEP_SECONDS = 1.0
_WAITING = 64
"""Compiles under way at once. Their threads only wait."""

_log = logging.getLogger("engine_client.vllm")


class Grammars:
    """Compiles for the model of a process, and the client that steps. Thread-safe.

    Args:
        settings: How to reach the service.
        model_config: The model, for the columns of its logits and where its tokenizer lies.
        tokenizer: The tokenizer as vLLM has it; None where vLLM has none: then only ids work.
    """

    def __init__(
        self, settings: EngineSettings, model_config: "ModelConfig", tokenizer: Any
    ) -> None:
        self.client = GrammarClient(
            settings.target,
            region_dir=settings.region_dir,
            step_timeout=settings.step_timeout,
            timeout=settings.timeout,
            policy=settings.policy,
            cool_down=settings.cool_down,
        )
        self._timeout = settings.timeout
        self._width = model_config.get_vocab_size()
        self._has_tokenizer = tokenizer is not None
        self._pool = ThreadPoolExecutor(_WAITING, thread_name_prefix="grammar-compile")
        # Reading 150,000 tokens takes a second, and the first request should not pay for it.
        self._vocabulary = self._pool.submit(self._read, model_config, tokenizer)
        self._live: dict[str, Callable[[], bool]] = {}
        self._released: SimpleQueue[str | None] = SimpleQueue()
        self._release = threading.Thread(
            target=self._close_released, name="grammar-release", daemon=True
        )
        self._release.start()

    def compile(self, wanted: GrammarSpec | str) -> "Future[Grammar]":
        """A grammar by its spec or id; the future has it, or a ClientError or ValueError."""
        return self._pool.submit(self._compile, wanted, time.monotonic() + self._timeout)

    def close_with(
        self, owner: object, sequence_id: str, ended: Callable[[], bool] = lambda: False
    ) -> None:
        """Closes a sequence soon after its owner is freed, or it ended, or this is closed.

        An engine that goes idle holds its last request for as long, so `ended` is asked too.
        """
        self._live[sequence_id] = ended
        weakref.finalize(owner, self._released.put, sequence_id).atexit = False

    def close(self) -> None:
        """Ends the compiles and the client."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._released.put(None)
        self._release.join(_CLOSE_SECONDS)

    def _compile(self, wanted: GrammarSpec | str, deadline: float) -> Grammar:
        if time.monotonic() > deadline:
            raise Unreachable(f"{_WAITING} compiles before this one took its {self._timeout} s")
        if isinstance(wanted, str):
            return self._checked(self.client.get_grammar(wanted))
        grammar = self.client.compile(wanted, self._vocabulary.result())
        if grammar.unenforced:
            named = ", ".join(f"{item.keyword} at {item.pointer}" for item in grammar.unenforced)
            _log.warning("grammar %s doesn't enforce %s", grammar.id, named)
        return grammar

    def _checked(self, grammar: Grammar) -> Grammar:
        """A grammar by id. Raises ValueError for one of another tokenizer."""
        if grammar.width != self._width:
            raise ValueError(
                f"grammar {grammar.id} is for logits of {grammar.width} columns, and this model "
                f"has {self._width}"
            )
        if self._has_tokenizer and grammar.tokenizer_id != self._vocabulary.result().id:
            raise ValueError(f"grammar {grammar.id} was compiled for another tokenizer")
        return grammar

    def _read(self, model_config: "ModelConfig", tokenizer: Any) -> Vocabulary:
        width = self._width
        if tokenizer is None:
            raise ValueError("this engine has no tokenizer: name a grammar by its id")
        if hasattr(tokenizer, "backend_tokenizer"):
            vocabulary = Vocabulary.from_huggingface(tokenizer, width=width)
        else:
            vocabulary = Vocabulary.from_path(model_config.tokenizer, width=width)
        self._pool.submit(self._register, vocabulary)
        return vocabulary

    def _register(self, vocabulary: Vocabulary) -> None:
        """Ahead of the first compile, which would do it too."""
        try:
            self.client.register_tokenizer(vocabulary)
        except ClientError as error:
            _log.warning("the tokenizer isn't registered yet: %s", error)

    def _close_released(self) -> None:
        """Closes sequences in batches, and at the end the client."""
        while True:
            closing: set[str | None] = set()
            with contextlib.suppress(Empty):
                closing.add(self._released.get(timeout=_SWEEP_SECONDS))
            while not self._released.empty():
                closing.add(self._released.get())
            live = list(self._live.items())
            over = None in closing
            known = [name for name, ended in live if over or name in closing or ended()]
            self.client.close_sequences(known)
            for name in known:
                self._live.pop(name, None)
            if over:
                self.client.close()
                return
