"""The client of one vLLM process: the model's vocabulary, and compiles that nobody waits for."""

import logging
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from engine_client.client import GrammarClient
from engine_client.errors import ClientError, Unreachable
from engine_client.spec import GrammarSpec
from engine_client.types import Grammar
from engine_client.vllm.settings import EngineSettings
from engine_client.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vllm.config import ModelConfig

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
        self._live: set[str] = set()
        self._released: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=self._close_released, name="grammar-release", daemon=True).start()

    def compile(self, wanted: GrammarSpec | str) -> "Future[Grammar]":
        """A grammar by its spec or id; the future has it, or a ClientError or ValueError."""
        return self._pool.submit(self._compile, wanted, time.monotonic() + self._timeout)

    def close_with(self, owner: object, sequence_id: str) -> None:
        """Closes a sequence soon after its owner is freed, or when this is closed."""
        self._live.add(sequence_id)
        weakref.finalize(owner, self._released.put, sequence_id).atexit = False

    def close(self) -> None:
        """Ends the compiles and the client."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._released.put(None)

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
            ids = [self._released.get()]
            while not self._released.empty():
                ids.append(self._released.get())
            ended = None in ids
            closing = {sequence_id for sequence_id in ids if sequence_id}
            self.client.close_sequences(list(self._live if ended else closing))
            self._live -= closing
            if ended:
                self.client.close()
                return
