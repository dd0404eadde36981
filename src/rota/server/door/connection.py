"""A connection has limits: how large and slow a head may be, how slow a body, and how slowly a client may read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rota.core.config import ListenConfig
from rota.core.errors import Fault, FaultCode
from rota.observe.meters import Closure
from rota.server.door.book import OpenConnection
from rota.server.door.handover import EXTENSION, LEAST_BYTES, Handover
from rota.server.errors import ERROR_KINDS, error_body

# ── raw errors ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A raw error is a whole HTTP response in bytes, for a connection that the application never sees.


def raw_error(fault: Fault) -> bytes:
    """The same body as any other error. The connection ends with it."""
    kind = ERROR_KINDS[fault.code]
    body = msgspec.json.encode(error_body(fault))
    head = [
        f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *([] if kind.retry_after_s is None else [f"retry-after: {kind.retry_after_s}"]),
    ]
    return "\r\n".join([*head, "\r\n"]).encode() + body


# ── body deadline ───────────────────────────────────────────────────────────────────────────────────────────────────
# A body has a deadline that moves on with the bytes that arrive, and is never far ahead: an idle body expires.

# A client that sends no faster than this for long is not waited for.
BYTES_PER_S = 10_000


class BodyDeadline:
    """`is_answered` says that bytes no longer count for more time, and `is_held` that the server itself does not read.

    Without `is_answered` a client that was refused could go on with its body for ever.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        body_s: float,
        is_answered: Callable[[], bool],
        is_held: Callable[[], bool],
        on_late: Callable[[], None],
    ) -> None:
        self._loop, self._body_s = loop, body_s
        self._is_answered, self._is_held, self._on_late = is_answered, is_held, on_late
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at, self._counted = 0.0, 0  # at the last look: when, and the bytes by then
        self._left_s = 0.0
        self.bytes = 0  # of the body, so far

    def add(self, count: int) -> None:
        self.bytes += count

    def start(self) -> None:
        """A body is not complete. Does nothing if that is known already."""
        if self._timer is None:
            self._looked_at, self._counted = self._loop.time(), 0
            self._wait(self._body_s)

    def stop(self) -> None:
        self.bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, left_s: float) -> None:
        """However fast a body came, it has no more than `body_s` from now: else a large one could rest for hours."""
        self._left_s = min(left_s, self._body_s)
        self._timer = self._loop.call_later(self._left_s, self._check)

    def _check(self) -> None:
        now, earned_s = self._loop.time(), (self.bytes - self._counted) / BYTES_PER_S
        left_s = self._left_s + self._looked_at - now + (0.0 if self._is_answered() else earned_s)
        self._looked_at, self._counted = now, self.bytes
        if self._is_held():
            left_s = self._body_s
        if left_s > 0.0:
            self._wait(left_s)
        else:
            self._on_late()


# All lines and headers together. The parser itself has no limit.
MAX_HEAD_BYTES = 64 * 1024
# A client that reads no byte of a waiting answer for this long will not read on.
READ_S = 120.0


class BoundedConnection(HttpToolsProtocol):
    """Uvicorn's protocol closes idle connections after an answer, but would wait for ever for a head or a body."""

    head_s = ListenConfig().head_timeout  # from the start of a connection, or from the first byte after an answer
    body_s = ListenConfig().body_timeout
    read_s = READ_S

    def __init__(
        self, *args: Any, entry: OpenConnection | None = None, limits: ListenConfig | None = None, **named: Any
    ) -> None:
        """`entry` is its place in the server's book of connections."""
        super().__init__(*args, **named)
        if limits:
            self.head_s, self.body_s = limits.head_timeout, limits.body_timeout
        self._entry = entry
        self._began_at = self.loop.time()  # before the TLS handshake, if there is one
        self._head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._body = BodyDeadline(
            self.loop, self.body_s, self._is_answered, lambda: self.flow.read_paused, self._on_late_body
        )
        self._handover: Handover | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._entry:
            self._entry.close = transport.abort
        self._start_head_timer(self._began_at + self.head_s - self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_read_timer()
        self._body.stop()
        if self._handover:
            self._handover.stop()
        if self._entry:
            self._entry.gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        if was_in_head:
            self._head_bytes += len(data)  # counted before parsing: if the head ends in it, the rest is a body
        super().data_received(data)
        if self.transport.is_closing():
            self._watch_reading()
        elif not self._is_in_head:
            self._body.start()
        elif was_in_head:
            self._check_head()

    def _check_head(self) -> None:
        if self._head_timer is None:
            self._start_head_timer(self.head_s)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()
        self._offer_handover()
        if self._entry:
            self._entry.busy()

    def on_body(self, body: bytes) -> None:
        self._body.add(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        self._body.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._entry and not self.pipeline:
            self._entry.idle()
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reading()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reading()

    # ── a body that a thread reads ───────────────────────────────────────────────────────────────────────────────

    def _offer_handover(self) -> None:
        length = int(next((value for name, value in self.headers if name == b"content-length"), b"0"))
        if length > LEAST_BYTES and self.scheme == "http":  # with TLS, only the event loop has the keys
            self.scope["extensions"] = {EXTENSION: {"take": partial(self._hand_over, self.cycle, length)}}

    def _hand_over(self, cycle: RequestResponseCycle, length: int) -> Handover | None:
        """None if too little of the body is still to come, or waits here to be read first."""
        left = length - self._body.bytes
        is_arriving = cycle is self.cycle and cycle.more_body and not cycle.body and not self.transport.is_closing()
        if not is_arriving or left < LEAST_BYTES:
            return None
        handle = self.transport.get_extra_info("socket").fileno()
        with suppress(OSError):  # no more files may be open
            self._handover = Handover(handle, left, self._body.add, self._take_back)
            self.flow.resume_reading()  # in name: a deadline does not count while the server itself holds a body up
            self.transport.pause_reading()
        return self._handover

    def _take_back(self, handover: Handover) -> None:
        self._handover = None
        if handover.left:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.parser = type(self.parser)(self)  # the old one still waits for the body
            with suppress(AttributeError):  # as uvicorn does; httptools before 0.6.3 has no such thing
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.on_message_complete()
            self.transport.resume_reading()

    # ── a client that reads too slowly ───────────────────────────────────────────────────────────────────────────

    def pause_writing(self) -> None:
        """The client's buffer is full. Writers wait from now on."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        self._stop_read_timer()
        super().resume_writing()
        if self.transport.is_closing():
            self._watch_reading()

    def _watch_reading(self) -> None:
        """Also of a connection that is closing: it stays open until its client has read the last byte."""
        self._stop_read_timer()
        unread = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self.read_s, self._check_reading, unread)

    def _check_reading(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._watch_reading()
        else:
            self._note(Closure.SLOW_READER)
            self.transport.abort()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    # ── a client that sends too slowly ───────────────────────────────────────────────────────────────────────────

    def _on_late_body(self) -> None:
        self._note(Closure.SLOW_BODY)
        if not self.cycle.response_started:
            message = "The body came too slowly; send it faster, or raise --body-timeout."
            self.transport.write(raw_error(Fault(FaultCode.BODY_TOO_SLOW, message)))
        self.transport.close()
        self._watch_reading()

    def _start_head_timer(self, time_s: float) -> None:
        self._head_timer = self.loop.call_later(time_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        if self._is_answered():
            self._note(Closure.SLOW_HEAD)
            self.transport.close()
            self._watch_reading()
        else:
            # An answer is being sent, and its client sent a little more than its request, for example an empty line.
            self._start_head_timer(self.head_s)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _note(self, why: Closure) -> None:
        if self._entry:
            self._entry.note(why)
