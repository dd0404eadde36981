"""Logs are lines on stderr: text with `name=value` pairs for people, or JSON for programs."""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Literal, TextIO

import msgspec

from rota.core.errors import RotaError

# ── stray lines ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Stray lines reach stderr past the log, from C code, other libraries or child processes; here they join the log.

STDERR = 2
_READ_BYTES = 65_536


@contextmanager
def stray_lines(tell: Callable[[str], None]) -> Iterator[TextIO]:
    """Inside the `with` block a thread calls `tell` with every line on stderr; yields the former stderr.

    Descriptor 2 itself is a pipe, so every line of this process and its children goes through it.
    """
    sys.stderr.flush()
    before = os.dup(STDERR)
    outlet, inlet = os.pipe()
    os.dup2(inlet, STDERR)
    os.close(inlet)
    # A child may keep its end of the pipe open for longer: the reader cannot wait for the end of the file.
    wake, bell = os.pipe()
    reader = threading.Thread(target=_read, args=(outlet, wake, tell), name="rota-stray-lines", daemon=True)
    reader.start()
    try:
        with open(before, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stream:
            yield stream
    finally:
        sys.stderr.flush()
        os.dup2(before, STDERR)
        os.close(bell)
        reader.join()
        for descriptor in (before, outlet, wake):
            os.close(descriptor)


def _read(outlet: int, wake: int, tell: Callable[[str], None]) -> None:
    poll = select.poll()
    poll.register(outlet, select.POLLIN)
    poll.register(wake, select.POLLIN)
    rest = b""
    # The loop ends when it is woken with nothing left to read, or when all writers have closed the pipe.
    while outlet in dict(poll.poll()) and (read := os.read(outlet, _READ_BYTES)):
        *lines, rest = (rest + read).split(b"\n")
        # A progress bar returns to the beginning of its line; its last state is enough.
        rest = rest.rpartition(b"\r")[2]
        for line in lines:
            _tell(line, tell)
    _tell(rest, tell)


def _tell(line: bytes, tell: Callable[[str], None]) -> None:
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    if text.strip():
        with suppress(Exception):  # a line that cannot be told is lost: a reader that stops would block the writers
            tell(text)


LOG = logging.getLogger("rota")

# Printable ASCII without spaces, quotes and equals signs.
_PLAIN = re.compile(r"[!#-<>-~]+")

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@contextmanager
def logs_as(form: LogFormat, level: LogLevel, is_quiet: bool = False) -> Iterator[None]:
    """A server's logs while it serves. With JSON, all of stderr is JSON, also the sentence that ends the server."""
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    handler = set_up_logs(form, level, is_quiet)
    if form == "text":
        yield
        return
    with stray_lines(partial(_take_in, handler)) as stderr:
        handler.setStream(stderr)
        try:
            yield
        except RotaError as error:
            LOG.error("%s", error)
            raise SystemExit(error.exit_code) from None
        except Exception as error:  # the process border: the last line of stderr must be JSON too
            LOG.critical("The server failed.", exc_info=error)
            raise SystemExit(1) from None
        finally:
            handler.setStream(sys.stderr)
            sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
            logging.captureWarnings(False)


def set_up_logs(form: LogFormat, level: LogLevel, is_quiet: bool = False) -> logging.StreamHandler[TextIO]:
    """Write Rota's logs from this level on (if quiet, from warnings on), and the warnings of other libraries.

    With JSON, also what Python itself would print: warnings, and uncaught errors.
    """
    handler = _LogLines()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logger, root = logging.getLogger("rota"), logging.getLogger()
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING if is_quiet else 0))
    root.handlers = [handler, *(other for other in root.handlers if not isinstance(other, _LogLines))]
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        sys.unraisablehook = lambda told: _log_uncaught(told.exc_type, told.exc_value, told.exc_traceback)
        threading.excepthook = lambda told: _log_uncaught(told.exc_type, told.exc_value, told.exc_traceback)
    return handler


class _LogLines(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: a log that cannot be written cannot say so."""


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    LOG.error("Uncaught %s.", kind.__name__, exc_info=(kind, error or kind(), trace))


def _take_in(handler: logging.StreamHandler[TextIO], line: str) -> None:
    """Write a stray line as a log line; a line that a child process wrote as a log line stays as it is."""
    if _is_log_line(line):
        with handler.lock or nullcontext():
            handler.stream.write(f"{line}\n")
            handler.flush()
    else:
        handler.handle(logging.makeLogRecord({"msg": "%s", "args": (line,), "levelname": "INFO"}))


def _is_log_line(line: str) -> bool:
    try:
        return line.startswith("{") and {"time", "level", "message"} <= msgspec.json.decode(line).keys()
    except msgspec.DecodeError:
        return False


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
    """A plain word as it is, other text as JSON: no value can look like the next pair, or begin a new line."""
    text = "; ".join(value) if isinstance(value, list) else str(value)
    return text if _PLAIN.fullmatch(text) else msgspec.json.encode(text).decode()
