"""Structured logs. Bodies, header values and keys never go in: log calls name ids, engines, durations and reasons."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import structlog
from structlog.typing import EventDict

if TYPE_CHECKING:
    from extproc.configsections import Log

log: Any = structlog.get_logger("extproc")


def configure(settings: Log, **constants: Any) -> None:
    """One line per event on standard error, as JSON or for people; from libraries, warnings and worse.

    ``constants`` are added to every line of ours.
    """
    level = logging.getLevelName(settings.level.upper())

    def with_constants(_logger: Any, _name: str, event: EventDict) -> EventDict:
        return {**constants, **event}

    structlog.configure(
        processors=[with_constants, *_described(), *_rendered(settings)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # A line is one write: workers share standard error, and PrintLogger writes the end of the line by itself.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *_described()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendered(settings)],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)


def _described() -> Sequence[Any]:
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_empty,
    ]


def _rendered(settings: Log) -> Sequence[Any]:
    """From an event to one line of text (an exception's trace, for people, takes more)."""
    if settings.format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Its default shows local variables: bodies are among them.
    traces = structlog.dev.plain_traceback
    return [_legible, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=traces)]


def _without_empty(_logger: Any, _name: str, event: EventDict) -> EventDict:
    return {key: value for key, value in event.items() if value is not None}


def _legible(_logger: Any, _name: str, event: EventDict) -> EventDict:
    """Clients choose ids and paths: no character of theirs moves a cursor, ends a line or passes for another."""
    return {key: _escaped(value) if isinstance(value, str) else value for key, value in event.items()}


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
