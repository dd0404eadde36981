"""Listening: a server on a port that is held from the start, and a clean end when a signal asks for one."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError, RotaError
from rota.runtime.closable import ClosableService
from rota.runtime.heap import freeze_heap
from rota.server.connections import BoundedConnection

Say = Callable[[str], None]

# Connections that wait until the server takes them in.
_BACKLOG = 2048
# How long a client may take to read the end of its answer when all have ended.
_READ_S = 2


class GracefulServer(uvicorn.Server):
    """A server whose open answers may end, and are not cut off without a word, when it has to go.

    The first signal closes the door: it goes on answering whoever is inside, and refuses others with 503. The second
    ends whoever is left, and the third does not even wait until they have read that.
    """

    def __init__(self, app: FastAPI, service: ClosableService, drain_s: float, say: Say) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedConnection,
                ws="none",
                log_config=None,  # as everybody else's lines
                log_level="warning",
                lifespan="on",
                timeout_graceful_shutdown=_READ_S,
            )
        )
        self._service = service
        self._drain_s = drain_s
        self._say = say
        self._signals = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def was_told_to_stop(self) -> bool:
        return self._signals > 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.was_told_to_stop:
            self._begin_to_leave()

    def handle_exit(self, _signal: int, _frame: FrameType | None) -> None:
        """Runs in the middle of whatever the main thread does, so it leaves the doing to the event loop."""
        self._signals += 1
        if self.started:
            self._loop.call_soon_threadsafe(self._hurry if self._signals > 1 else self._begin_to_leave)

    def _begin_to_leave(self) -> None:
        if self._service.open_requests:
            self._say(
                f"Rota is stopping: {self._service.open_requests} requests have {self._drain_s:g} seconds to end; "
                "a second signal ends them at once."
            )
        self._tasks.append(self._loop.create_task(self._leave()))

    async def _leave(self) -> None:
        await asyncio.to_thread(self._service.close, self._drain_s)
        # Whoever is still open is aborted by this, and every answer says so as its last event.
        await asyncio.to_thread(self._service.stop)
        self.should_exit = True

    def _hurry(self) -> None:
        self._tasks.append(self._loop.create_task(asyncio.to_thread(self._service.stop)))
        self.force_exit = self._signals > 2


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that keeps a port and lets no connection in yet; raises ConfigError if the port is taken.

    It is not asked to listen here: clients that come while the model is read are refused at once, and do not hang.
    """
    is_six = ":" in host
    holder = socket.socket(socket.AF_INET6 if is_six else socket.AF_INET)
    try:
        # Connections of a server that has just ended would keep the port from the next one for a minute.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_six:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((host, port))
    except (OSError, OverflowError) as error:
        holder.close()
        raise _taken(host, port, error) from error
    return holder


def listen(
    holder: socket.socket,
    app: FastAPI,
    service: ClosableService,
    config: ServerConfig,
    announce: Callable[[str], None],
    say: Say = print,
) -> None:
    """Serve on a port that is held, until SIGINT or SIGTERM; `announce` hears the URL as soon as requests are answered.

    Raises RotaError with the reason when the service cannot even start.
    """
    try:
        holder.listen(_BACKLOG)
    except OSError as error:  # two servers may hold a port that none of them listens on yet; the first to listen has it
        raise _taken(config.host, config.port, error) from error
    server = GracefulServer(app, service, config.drain_timeout, say)
    failures: list[RotaError] = []

    def wait() -> None:
        try:
            service.wait_until_ready()
            freeze_heap()
            announce(_url(holder))
        except RotaError as error:
            if not server.was_told_to_stop:
                failures.append(error)
                server.should_exit = True

    threading.Thread(target=wait, name="rota-announce", daemon=True).start()
    server.run([holder])
    if failures:
        raise failures[0]


def _taken(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"Cannot listen on {host}, port {port} ({error}); choose another with --host and --port (0: any free port)."
    )


def _url(holder: socket.socket) -> str:
    host, port = holder.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
