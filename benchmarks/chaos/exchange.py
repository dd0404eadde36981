"""An exchange sends one ask over a connection of its own and reads the answer, in the manner of the ask's client."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import httptools

from .asks import Ask
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
    try:
        reader, writer = await _connect(port, ask)
    except OSError as error:
        return Ending(Kind.CUT, "cut", detail=f"no connection: {error}")
    try:
        # A server may answer and close before it has read a body that it refuses: the answer counts.
        with suppress(ConnectionError):
            await _send(writer, ask)
        if not await _receive(reader, received, ask):
            if ask.manner.leaves_with_reset:
                writer.transport.abort()
            return Ending(Kind.LEFT, "left", received.status)
    except ConnectionError as error:
        if not received.is_complete:
            return Ending(Kind.CUT, "cut", received.status, str(error))
    except httptools.HttpParserError as error:
        return Ending(Kind.BROKEN, "broken", received.status, f"not HTTP: {error}")
    finally:
        writer.close()
        with suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()
    return read_ending(received, ask.form, ask.choices)


async def _connect(port: int, ask: Ask) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    manner = ask.manner
    connection = socket.socket(socket.AF_INET)
    try:
        connection.setblocking(False)
        if manner.slow_reads:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        if manner.from_host:
            connection.bind((manner.from_host, 0))
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        limit = _SLOW_READ_BYTES if manner.slow_reads else _READ_BYTES
        return await asyncio.open_connection(sock=connection, limit=limit)
    except BaseException:  # also a deadline: the socket has no other owner yet
        connection.close()
        raise


async def _send(writer: asyncio.StreamWriter, ask: Ask) -> None:
    manner, body = ask.manner, ask.body or b""
    writer.write(ask.head)
    size = max(1, -(-len(body) // manner.sends_in))
    for number, start in enumerate(range(0, len(body), size)):
        if number == manner.stops_after:
            return
        if number:
            await asyncio.sleep(manner.pause_s)  # the client's manner
        writer.write(body[start : start + size])
        await writer.drain()


async def _receive(reader: asyncio.StreamReader, received: Received, ask: Ask) -> bool:
    """Read to the end of the connection; False if the client leaves first."""
    parser, manner = _Parser(received), ask.manner
    if manner.stops_after is not None:
        await asyncio.sleep(manner.pause_s)  # the client's manner
        return False
    reads = 0
    while True:
        if reads == manner.leaves_after:
            return False
        if reads < manner.slow_reads:
            await asyncio.sleep(manner.pause_s)  # the client's manner
        data = await reader.read(_SLOW_READ_BYTES if reads < manner.slow_reads else _READ_BYTES)
        if not data:
            return True
        reads += 1
        parser.feed(data)
