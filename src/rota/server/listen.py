"""Listening: a port, a server on it, and a clean end when a signal asks for one."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError, RotaError
from rota.runtime.service import Service

# Once told to stop: how long answers may go on by themselves, and how long a client may take to read their end.
_GRACE_S = 1
_READ_S = 2


class GracefulServer(uvicorn.Server):
    """A server whose open answers end with a word, and are not cut off, when it has to go."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=_GRACE_S + _READ_S)
        )
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Stopping the service aborts whoever is open, and every answer says so as its last event.
        loop = asyncio.get_running_loop()
        ending = loop.call_later(_GRACE_S, loop.run_in_executor, None, self._service.stop)
        await super().shutdown(sockets)
        ending.cancel()


def listen(app: FastAPI, service: Service, config: ServerConfig, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `announce` hears the URL as soon as requests are answered.

    Raises RotaError with the reason when the service cannot even start.
    """
    listener = _open_port(config.host, config.port)
    server = GracefulServer(app, service)
    failures: list[RotaError] = []

    def wait() -> None:
        try:
            service.wait_until_ready()
            announce(_url(listener))
        except RotaError as error:
            if not server.should_exit:
                failures.append(error)
                server.should_exit = True

    threading.Thread(target=wait, name="rota-announce", daemon=True).start()
    with _signals_end_in_peace():
        server.run([listener])
    if failures:
        raise failures[0]


def _open_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"Cannot listen on {host}, port {port} ({error}); choose another with --host and --port (0: any free port)."
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _signals_end_in_peace() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more when it is done; here that shall mean nothing."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
