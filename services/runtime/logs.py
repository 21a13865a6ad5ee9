"""Structured logs on stderr, one event a line: JSON for machines, colours for a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logs(service: str, level: LogLevel, log_format: LogFormat) -> None:
    """Send structlog and the standard library's loggers through one formatter. Call once, at start."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _named(service),
    ]
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    renderers = _json_renderers() if as_json else _console_renderers()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # They log each request or file they touch.
    for name in ("httpx", "httpcore", "asyncio", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


# A traceback's local variables hold what users wrote, so neither renderer shows them.


def _json_renderers() -> list[structlog.typing.Processor]:
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]


def _console_renderers() -> list[structlog.typing.Processor]:
    formatter = structlog.dev.RichTracebackFormatter(show_locals=False)
    return [structlog.dev.ConsoleRenderer(exception_formatter=formatter)]


def _named(service: str) -> structlog.typing.Processor:
    def add(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return add
