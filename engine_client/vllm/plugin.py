"""What vLLM's `vllm.general_plugins` entry point loads, in each of its processes.

Without GRAMMAR_CLIENT_TARGET it does nothing at all. With it:
- EngineCore makes our structured-output manager,
- requests are validated by the service as they are submitted.

It puts these in place of vLLM's own by name, so it knows the versions in which the names mean what
they should: others are told plainly, and one that lacks a name doesn't start.
"""

import logging
import os
from typing import Any

TESTED = ("0.32.0",)
"""Versions of vLLM whose tests pass with this package."""

_log = logging.getLogger("engine_client.vllm")


def install() -> None:
    """Switches vLLM over to the service, if the environment says so. Harmless when repeated.

    Raises RuntimeError for a vLLM that lacks what this replaces: a server that was to enforce
    grammars must not start without.
    """
    if not os.environ.get("GRAMMAR_CLIENT_TARGET"):
        return
    from vllm import __version__, envs

    _be_heard(envs.VLLM_LOGGING_LEVEL)
    if __version__ not in TESTED:
        _log.warning(
            "vLLM %s isn't one that the grammar service's client was tested with (%s): try a "
            "request of each kind before you rely on it",
            __version__,
            ", ".join(TESTED),
        )
    try:
        _replace()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"vLLM {__version__} isn't supported by this version of the grammar service's client "
            f"(tested: {', '.join(TESTED)}): {error}; unset GRAMMAR_CLIENT_TARGET to start without"
        ) from error


def _replace() -> None:
    """Puts our manager and validation in their places."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import core
    from vllm.v1.engine.input_processor import InputProcessor

    from engine_client.vllm import validation
    from engine_client.vllm.manager import GrammarManager

    if core.StructuredOutputManager is GrammarManager:
        return
    for owner, name in (
        (core.StructuredOutputManager, "_get_constraint_bounds"),
        (core.StructuredOutputManager, "grammar_bitmask"),
        (SamplingParams, "_validate_structured_outputs"),
        (InputProcessor, "_validate_params"),
    ):
        getattr(owner, name)
    own = validation.Validation()
    vllms_own = InputProcessor._validate_params

    def validate(processor: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        result = vllms_own(processor, params, *args, **kwargs)
        own.check(processor, params)
        return result

    InputProcessor._validate_params = validate
    SamplingParams._validate_structured_outputs = validation.keep_out
    core.StructuredOutputManager = GrammarManager


def _be_heard(level: str) -> None:
    """Has our log lines appear as vLLM's do, which configures its own logger alone."""
    logger = logging.getLogger("engine_client")
    if not logger.handlers:
        for handler in logging.getLogger("vllm").handlers:
            logger.addHandler(handler)
        logger.setLevel(level)
