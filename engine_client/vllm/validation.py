"""A request's grammar is checked, and compiled, when it is submitted: a bad one is an HTTP 400.

vLLM's own check compiles the spec in the API server, with the backend that it would have used, and
without a limit; so that check is replaced, not added to.
"""

import logging
import threading
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from engine_client.errors import Refused, ServiceError, UsageError
from engine_client.spec import GrammarSpec
from engine_client.types import Grammar
from engine_client.vllm.grammars import Grammars
from engine_client.vllm.requests import EXTRA_ARG, spec_of_args, spec_of_params
from engine_client.vllm.settings import EngineSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, StructuredOutputsConfig
    from vllm.v1.engine.input_processor import InputProcessor

_log = logging.getLogger("engine_client.vllm")


@dataclass(slots=True, eq=False)
class _FrontEnd:
    """What one input processor's requests are checked with."""

    settings: EngineSettings
    grammars: Grammars
    late: Future[Grammar] | None = None
    """A compile that wasn't waited for to the end."""


class Validation:
    """Checks the grammars of a process's requests. Thread-safe."""

    def __init__(self) -> None:
        self._front_ends: WeakKeyDictionary[InputProcessor, _FrontEnd] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def check(self, processor: "InputProcessor", params: Any) -> None:
        """Raises VLLMValidationError for a request whose grammar is refused."""
        if not isinstance(params, SamplingParams):
            return
        front_end = self._front_end(processor)
        try:
            wanted = _wanted(processor, params, front_end.settings.allow_unenforced)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise VLLMValidationError(f"the grammar can't be read: {error}") from None
        if wanted is None:
            return
        if processor.tokenizer is None and not isinstance(wanted, str):
            raise VLLMValidationError(
                "this server has no tokenizer: name a grammar that was compiled before, by its id"
            )
        _compile(front_end, wanted)

    def _front_end(self, processor: "InputProcessor") -> _FrontEnd:
        with self._lock:
            found = self._front_ends.get(processor)
            if found is None:
                settings = EngineSettings()
                grammars = Grammars(settings, processor.model_config, processor.tokenizer)
                weakref.finalize(processor, grammars.close).atexit = False
                found = self._front_ends[processor] = _FrontEnd(settings, grammars)
            return found


def _wanted(
    processor: "InputProcessor", params: SamplingParams, allow_unenforced: bool
) -> GrammarSpec | str | None:
    """What the request asks for, natively or of the logits processor. Raises ValueError."""
    native, args = params.structured_outputs, (params.extra_args or {}).get(EXTRA_ARG)
    if native is not None and native.all_constraints_none():
        native = None
    if native is not None and args is not None:
        raise ValueError(
            f"the request has structured_outputs and extra_args[{EXTRA_ARG!r}]; drop one"
        )
    if native is not None:
        if processor.model_config.is_diffusion:
            raise ValueError("structured outputs need a model that samples left to right")
        return spec_of_params(native, processor.structured_outputs_config, allow_unenforced)
    if args is not None:
        _check_processor(processor)
        return spec_of_args(args)
    return None


def _compile(front_end: _FrontEnd, spec: GrammarSpec | str) -> None:
    """Compiles a spec; a refusal that comes in time is the request's error."""
    compiled = front_end.grammars.compile(spec)
    seconds = front_end.settings.validate_seconds
    if front_end.late is not None and not front_end.late.done():
        seconds = 0.0  # the service is slow or gone: don't lose this time with each request
    try:
        compiled.result(seconds)
    except FutureTimeout:
        front_end.late = compiled
    except Refused as error:
        if error.reason == "COMPILE_QUEUE_FULL":
            _log.warning("a grammar isn't checked yet: %s", error)
            return  # no fault of the request's: the engine asks again
        raise VLLMValidationError(str(error)) from None
    except (UsageError, ValueError) as error:
        raise VLLMValidationError(str(error)) from None
    except ServiceError as error:
        _log.warning("a grammar isn't checked yet: %s", error)


def _check_processor(processor: "InputProcessor") -> None:
    """Raises ValueError where the logits processor can't run, and vLLM would skip it."""
    config = processor.vllm_config
    if config.speculative_config is not None and not config.use_v2_model_runner:
        raise ValueError(
            "logits processors don't run with speculative decoding on this model runner: "
            "use structured_outputs"
        )


def keep_out(
    params: SamplingParams,
    _model_config: "ModelConfig",
    config: "StructuredOutputsConfig | None",
    _tokenizer: Any,
) -> None:
    """Takes the place of SamplingParams._validate_structured_outputs: no library is called here."""
    if config is not None and params.structured_outputs is not None:
        params.structured_outputs._backend = config.backend
