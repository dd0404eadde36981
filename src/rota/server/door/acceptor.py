"""The acceptor takes connections from the listening socket, within limits, and never waits for one of them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rota.core.errors import Fault, FaultCode
from rota.observe.meters import Closure, ConnectionRefusal
from rota.server.door.book import ConnectionBook, OpenConnection
from rota.server.door.connection import raw_error

LOG = logging.getLogger("rota.server")

# Errors of `accept` that mean: this process, or the machine, has no room for one more socket.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# After such an error: the socket that was closed to make room is then really gone.
_PAUSE_S = 0.01
_REFUSAL = raw_error(
    Fault(FaultCode.TOO_MANY_CONNECTIONS, "The server has too many connections; come back in a second.")
)

# Called with the connection's entry in the book, as `entry`.
MakeProtocol = Callable[..., asyncio.Protocol]


class Acceptor:
    """Uvicorn would let the event loop accept: without limits, and without a word when files run out."""

    def __init__(
        self,
        listener: socket.socket,
        book: ConnectionBook,
        make_protocol: MakeProtocol,
        handshake_s: float,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """`context` is asked for every connection, because a certificate may be replaced."""
        self._listener, self._book, self._make_protocol = listener, book, make_protocol
        self._handshake_s, self._context = handshake_s, context
        self._tasks: set[asyncio.Task[None]] = set()
        # Given up for a moment when files run out, so that a client can be told.
        self._spare = _spare_file()

    def start(self) -> None:
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._accepting = self._loop.create_task(self._accept_all())

    def stop(self) -> None:
        """Accept no more. Connections that are complete stay open."""
        for task in (self._accepting, *self._tasks):
            task.cancel()
        self._give_spare_up()
        self._book.log.write()

    async def _accept_all(self) -> None:
        while True:
            try:
                peer, address = await self._loop.sock_accept(self._listener)
            except OSError as error:
                await self._recover(error)
            else:
                self._take(peer, address[0])
                await asyncio.sleep(0)  # other work goes on, however many connections wait

    def _take(self, peer: socket.socket, host: str) -> None:
        entry = self._book.admit(host)
        if entry is None:
            self._refuse(peer)
            return
        with suppress(OSError):  # the client may have left
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token does not wait for the next one
        task = self._loop.create_task(self._serve(peer, entry))
        entry.close = task.cancel  # until the connection is made
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: socket.socket, entry: OpenConnection) -> None:
        context = self._context()
        options: dict[str, Any] = (
            {} if context is None else {"ssl": context, "ssl_handshake_timeout": self._handshake_s}
        )
        try:
            await self._loop.connect_accepted_socket(partial(self._make_protocol, entry=entry), peer, **options)
        except ConnectionAbortedError:  # the handshake took too long
            entry.note(Closure.SLOW_HEAD)
            entry.gone()
        except OSError:  # the client left, or does not speak TLS
            entry.gone()
        except asyncio.CancelledError:
            entry.gone()
            raise

    def _refuse(self, peer: socket.socket) -> None:
        """Tell the client, if that takes no time. A client that expects TLS could not read it."""
        with suppress(OSError), peer:
            if self._context() is None:
                peer.setblocking(False)
                peer.send(_REFUSAL)
                peer.shutdown(socket.SHUT_WR)
                peer.recv(65536)  # a request that is not read would become a reset, and hide the answer

    async def _recover(self, error: OSError) -> None:
        if error.errno not in _NO_ROOM:
            LOG.warning("A connection could not be accepted (%s).", error)
        elif not self._book.make_room():
            self._refuse_with_spare()
        await asyncio.sleep(_PAUSE_S)

    def _refuse_with_spare(self) -> None:
        self._book.log.refused(ConnectionRefusal.FILES)
        self._give_spare_up()
        with suppress(OSError):
            self._refuse(self._listener.accept()[0])
        self._spare = _spare_file()

    def _give_spare_up(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def _spare_file() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None  # another thread was faster
