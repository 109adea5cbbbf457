"""Structured logs on stderr. Never the text of a prompt, an output or a spec."""

import logging
import sys
from typing import Any

import structlog


def configure(level: str, style: str) -> None:
    """Sets the process's logging up, once."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if style == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def logger() -> Any:
    """The service's logger."""
    return structlog.get_logger("grammar_service")
