"""The door lets connections in: it holds a port, and has the limits, the certificate and the deadlines of a server."""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial
from typing import TYPE_CHECKING

from rota.core.config import ListenConfig, ServerConfig
from rota.core.errors import ConfigError
from rota.observe.meters import ConnectionMeters
from rota.server.door.book import (
    ENOUGH,
    RESERVE,
    ConnectionBook,
    few_connections,
    find_limits,
    raise_open_files,
)
from rota.server.door.certificate import find_certificate

if TYPE_CHECKING:
    import uvicorn

    from rota.server.door.acceptor import Acceptor


# ── port ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A port is held from the start, before anything is read, so that one that is taken is refused at once.

PORT_FLAGS, METRICS_FLAGS = "--host and --port", "--metrics-host and --metrics-port"


def hold_port(host: str, port: int, flags: str = PORT_FLAGS) -> socket.socket:
    """A socket that holds a port but accepts no connection yet. Raises ConfigError if the port is taken.

    It does not listen yet. So a client that connects while the model is read is refused at once and does not hang.
    """
    is_six = ":" in host
    holder = socket.socket(socket.AF_INET6 if is_six else socket.AF_INET)
    try:
        # Otherwise connections of a server that has just ended block the port for a minute.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_six:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((host, port))
    except (OSError, OverflowError) as error:
        holder.close()
        raise taken(host, port, error, flags) from error
    return holder


def hold_metrics_port(config: ServerConfig) -> socket.socket | None:
    """A socket for the second port, held, or None without --metrics-port. Raises ConfigError if the port is taken."""
    if config.metrics_port is None:
        return None
    return hold_port(config.metrics_host, config.metrics_port, METRICS_FLAGS)


def taken(host: str, port: int, error: Exception, flags: str = PORT_FLAGS) -> ConfigError:
    """What is said of a port that cannot be had."""
    return ConfigError(
        f"Cannot listen on {host}, port {port} ({error}); choose another with {flags} (0: any free port)."
    )


# ── door ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Door:
    """Made before the model is read: a limit or a certificate that cannot work is a ConfigError at once."""

    def __init__(self, config: ListenConfig) -> None:
        asked = 0 if config.max_connections == "auto" else config.max_connections + RESERVE
        open_files = raise_open_files(max(asked, ENOUGH))
        self._config = config
        self._limits = find_limits(config, open_files)
        self.certificate = find_certificate(config)
        self.advice = few_connections(config, self._limits, open_files)  # a sentence for the operator, or empty
        self._acceptor: Acceptor | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"

    def open(self, listener: socket.socket, server: uvicorn.Server, meters: ConnectionMeters) -> None:
        """Accept connections for a server whose application has started."""
        # Imported here: it loads the web framework, and a check does not.
        from rota.server.door.acceptor import Acceptor
        from rota.server.door.connection import BoundedConnection

        # As uvicorn makes the protocol of a connection of its own.
        make = partial(
            BoundedConnection, server.config, server.server_state, server.lifespan.state, limits=self._config
        )
        book = ConnectionBook(self._limits, meters)
        self._acceptor = Acceptor(listener, book, make, self._config.head_timeout, self._context)
        self._acceptor.start()
        if self.certificate:
            self._watch = asyncio.get_running_loop().create_task(self.certificate.watch())

    def close(self) -> None:
        if self._acceptor:
            self._acceptor.stop()
        if self._watch:
            self._watch.cancel()

    def _context(self) -> ssl.SSLContext | None:
        return self.certificate.context if self.certificate else None
