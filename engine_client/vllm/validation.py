"""A request's grammar is checked, and compiled, when it is submitted: a bad one is an HTTP 400.

vLLM's own check compiles the spec in the API server, with the backend that it would have used, and
without a limit; so that check is replaced, not added to.
"""

import logging
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

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


class Validation:
    """Checks the grammars of one front end's requests. Thread-safe."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._grammars: dict[str, Grammars] = {}
        """By model: a process has one, but for tests."""
        self._late: Future[Grammar] | None = None
        """A compile that wasn't waited for to the end."""
        self._lock = threading.Lock()

    def check(self, processor: "InputProcessor", params: Any) -> None:
        """Raises VLLMValidationError for a request whose grammar is refused."""
        if not isinstance(params, SamplingParams):
            return
        try:
            wanted = self._wanted(processor, params)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        for spec in wanted:
            if processor.tokenizer is None and not isinstance(spec, str):
                raise VLLMValidationError(
                    "this server has no tokenizer: name a grammar that was compiled before, by "
                    "its id"
                )
            self._compile(self._grammars_of(processor), spec)

    def _wanted(
        self, processor: "InputProcessor", params: SamplingParams
    ) -> list[GrammarSpec | str]:
        """What the request asks for, natively and of the logits processor. Raises ValueError."""
        wanted: list[GrammarSpec | str] = []
        if params.structured_outputs is not None and (
            not params.structured_outputs.all_constraints_none()
        ):
            if processor.model_config.is_diffusion:
                raise ValueError("structured outputs need a model that samples left to right")
            config = processor.structured_outputs_config
            allow = self._settings.allow_unenforced
            wanted.append(spec_of_params(params.structured_outputs, config, allow))
        args = (params.extra_args or {}).get(EXTRA_ARG)
        if args is not None:
            if wanted:
                raise ValueError(
                    f"the request has structured_outputs and extra_args[{EXTRA_ARG!r}]; drop one"
                )
            _check_processor(processor)
            wanted.append(spec_of_args(args))
        return wanted

    def _compile(self, grammars: Grammars, spec: GrammarSpec | str) -> None:
        """Compiles a spec; a refusal that comes in time is the request's error."""
        compiled = grammars.compile(spec)
        seconds = self._settings.validate_seconds
        if self._late is not None and not self._late.done():
            seconds = 0.0  # the service is slow or gone: don't lose this time with each request
        try:
            compiled.result(seconds)
        except FutureTimeout:
            self._late = compiled
        except (Refused, UsageError, ValueError) as error:
            raise VLLMValidationError(str(error)) from None
        except ServiceError as error:
            _log.warning("a grammar isn't checked yet: %s", error)

    def _grammars_of(self, processor: "InputProcessor") -> Grammars:
        model = processor.model_config
        with self._lock:
            found = self._grammars.get(model.tokenizer)
            if found is None:
                found = Grammars(self._settings, model, processor.tokenizer)
                self._grammars[model.tokenizer] = found
            return found


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
