"""Logs are lines on stderr: text with `name=value` pairs for people, or JSON for programs."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

# Printable ASCII without spaces, quotes and equals signs.
_PLAIN = re.compile(r"[!#-<>-~]+")

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def set_up_logs(form: LogFormat, level: LogLevel, is_quiet: bool = False) -> None:
    """Let everything under `rota` be written so; the quiet hear only what is wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logger = logging.getLogger("rota")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING if is_quiet else 0))


class TextLines(logging.Formatter):
    """2026-11-15T05:23:11.123Z INFO request id=cmpl-1 key=anyone waited_for="its adapter has no slot" …"""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname} {record.getMessage()}"
        pairs = [f"{name}={_quoted(value)}" for name, value in _fields(self, record).items()]
        return " ".join([head, *pairs])


class JsonLines(logging.Formatter):
    """{"time":"2026-11-15T05:23:11.123Z","level":"info","message":"request","id":"cmpl-1",…}"""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _time(record), "level": record.levelname.lower(), "message": record.getMessage()}
        return msgspec.json.encode(head | _fields(self, record)).decode()


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    if record.exc_info:
        fields["error"] = formatter.formatException(record.exc_info)
    return fields


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def _quoted(value: Any) -> str:
    """As it is if it is one plain word, else as JSON: no value can look like the next pair, or begin a new line."""
    text = "; ".join(value) if isinstance(value, list) else str(value)
    return text if _PLAIN.fullmatch(text) else msgspec.json.encode(text).decode()
