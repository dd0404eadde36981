"""The door lets connections in: it has the limits and the deadlines of one server."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from rota.core.listen_config import ListenConfig
from rota.observe.connection_meters import ConnectionMeters
from rota.server.acceptor import Acceptor
from rota.server.connection_book import ConnectionBook, OpenConnection
from rota.server.connection_limits import few_connections, find_limits
from rota.server.connections import BoundedConnection
from rota.server.open_files import raise_open_files


class Door:
    """Made before the model is read: a limit that cannot work is a ConfigError at once."""

    def __init__(self, config: ListenConfig) -> None:
        open_files = raise_open_files()
        self._config = config
        self._limits = find_limits(config, open_files)
        self.advice = few_connections(config, self._limits, open_files)  # a sentence for the operator, or empty
        self._acceptor: Acceptor | None = None

    @property
    def scheme(self) -> str:
        return "http"

    def open(self, listener: socket.socket, server: uvicorn.Server, meters: ConnectionMeters) -> None:
        """Accept connections for a server whose application has started."""
        make = _Connections(self._config, server.config, server.server_state, server.lifespan.state)
        book = ConnectionBook(self._limits, meters)
        self._acceptor = Acceptor(listener, book, make, self._config.head_timeout)
        self._acceptor.start()

    def close(self) -> None:
        if self._acceptor:
            self._acceptor.stop()


class _Connections:
    """Makes the protocol of each new connection, as uvicorn does for its own."""

    def __init__(
        self, config: ListenConfig, uvicorn_config: uvicorn.Config, state: ServerState, app_state: dict[str, Any]
    ) -> None:
        self._config = config
        self._arguments = (uvicorn_config, state, app_state)

    def __call__(self, entry: OpenConnection) -> BoundedConnection:
        return BoundedConnection(*self._arguments, entry=entry, limits=self._config)
