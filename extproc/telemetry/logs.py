"""Structured logs. Bodies, header values and keys never go in: log calls name ids, engines, durations and reasons."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from extproc.config import Log

log: Any = structlog.get_logger("extproc")


def configure(settings: Log) -> None:
    """One line per event on standard error, as JSON or for people; from libraries, warnings and worse."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any
    if settings.format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    level = logging.getLevelName(settings.level.upper())
    structlog.configure(
        processors=[*shared, _without_empty, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(format="%(name)s: %(message)s", level=max(level, logging.WARNING), stream=sys.stderr)


def _without_empty(_logger: Any, _name: str, event: Any) -> Any:
    return {key: value for key, value in event.items() if value is not None}
