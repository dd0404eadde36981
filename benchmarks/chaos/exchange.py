"""An exchange sends one ask over a connection of its own and reads the answer, in the manner of the ask's client."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

import httptools

from .asks import Ask, Manner
from .endings import Ending, Kind, Received, read_ending

# A busy machine with two cores, an engine that starts again and a full queue together take less than this.
DEADLINE_S = 180.0
_READ_BYTES = 65_536
_SLOW_READ_BYTES = 512
# The kernel doubles it. A small buffer makes the server wait for a client that reads slowly.
_RECEIVE_BUFFER = 2048


class _Parser:
    """Parses an answer, and notes in `received` what has come."""

    def __init__(self, received: Received) -> None:
        self._received = received
        self._parser = httptools.HttpResponseParser(self)
        self._answers = 0

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._answers += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._received.is_stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self._received.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._received.body += body

    def on_message_complete(self) -> None:
        # A second answer on the connection makes the exchange incomplete, and so an error.
        self._received.is_complete = self._answers == 1


async def exchange(port: int, ask: Ask, deadline_s: float = DEADLINE_S) -> Ending:
    """Never raises for what a server does: a connection that is refused or lost is an ending too."""
    ending, _ = await fetch(port, ask, deadline_s)
    return ending


async def fetch(port: int, ask: Ask, deadline_s: float = DEADLINE_S) -> tuple[Ending, bytes]:
    """The same, with the body of the answer."""
    received = Received()
    try:
        async with asyncio.timeout(deadline_s):
            return await _exchange(port, ask, received), received.body
    except TimeoutError:
        return Ending(Kind.LATE, "late", received.status, f"no end within {deadline_s:g} seconds"), received.body


async def _exchange(port: int, ask: Ask, received: Received) -> Ending:
    # Not asyncio's streams: they drop what was received once a write has failed.
    with socket.socket(socket.AF_INET) as connection:
        connection.setblocking(False)
        try:
            await _connect(connection, port, ask.manner)
        except OSError as error:
            return Ending(Kind.CUT, "cut", detail=f"no connection: {error}")
        try:
            # A server may answer and close before it has read a body that it refuses: the answer counts.
            with suppress(ConnectionError):
                await _send(connection, ask)
            if not await _receive(connection, received, ask.manner):
                _leave(connection, ask.manner)
                return Ending(Kind.LEFT, "left", received.status)
        except ConnectionError as error:
            if not received.is_complete:
                return Ending(
                    Kind.CUT, "cut", received.status, f"{error}, after {len(received.body)} bytes of the body"
                )
        except httptools.HttpParserError as error:
            return Ending(Kind.BROKEN, "broken", received.status, f"not HTTP: {error}")
    return read_ending(received, ask.form, ask.choices)


async def _connect(connection: socket.socket, port: int, manner: Manner) -> None:
    if manner.slow_reads:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    if manner.from_host:
        connection.bind((manner.from_host, 0))
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))


async def _send(connection: socket.socket, ask: Ask) -> None:
    loop, manner, body = asyncio.get_running_loop(), ask.manner, ask.body or b""
    await loop.sock_sendall(connection, ask.head)
    size = max(1, -(-len(body) // manner.sends_in))
    for number, start in enumerate(range(0, len(body), size)):
        if number == manner.stops_after:
            return
        if number:
            await asyncio.sleep(manner.pause_s)  # the client's manner
        await loop.sock_sendall(connection, body[start : start + size])


async def _receive(connection: socket.socket, received: Received, manner: Manner) -> bool:
    """Read to the end of the connection; False if the client leaves first."""
    loop, parser = asyncio.get_running_loop(), _Parser(received)
    if manner.stops_after is not None:
        await asyncio.sleep(manner.pause_s)  # the client's manner
        return False
    reads = 0
    while True:
        if reads == manner.leaves_after:
            return False
        if reads < manner.slow_reads:
            await asyncio.sleep(manner.pause_s)  # the client's manner
        data = await loop.sock_recv(connection, _SLOW_READ_BYTES if reads < manner.slow_reads else _READ_BYTES)
        if not data:
            return True
        reads += 1
        parser.feed(data)


def _leave(connection: socket.socket, manner: Manner) -> None:
    if manner.leaves_with_reset:
        # A close with a lingering time of zero sends a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
