"""A server listens on a port that is held from the start, and ends cleanly after a signal."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from rota.core.config import ListenConfig, ServerConfig
from rota.core.errors import EngineLostError, RotaError
from rota.observe.meters import ConnectionMeters
from rota.runtime.children import freeze_heap
from rota.runtime.client import EngineClient
from rota.runtime.service import ServicePhase
from rota.server.door.connection import BoundedConnection
from rota.server.door.door import METRICS_FLAGS, PORT_FLAGS, Door, taken

# Uvicorn's lines get the server's log format.
_config = partial(uvicorn.Config, http=BoundedConnection, ws="none", log_config=None, log_level="warning")

# ── notify ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A service manager such as systemd is told when the server serves, and when it stops.


def notify(state: str) -> None:
    """Send one line of sd_notify(3), such as `READY=1`; without NOTIFY_SOCKET nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
        # A name that begins with @ is abstract: no file, and a zero byte in the place of the @.
        sender.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


# ── metrics port ────────────────────────────────────────────────────────────────────────────────────────────────────
# A second port serves metrics and probes alone, without keys: the endpoint picker of Kubernetes sends none.

# Scrapers are few. An idle connection makes room for another.
MOST_CONNECTIONS = 16
# Connections to it that wait until the server accepts them.
_METRICS_BACKLOG = 128


class MetricsPort:
    """Opened and closed by the server of the first port, in the same event loop."""

    def __init__(self, holder: socket.socket, config: ServerConfig) -> None:
        self.holder = holder
        self._door = Door(
            ListenConfig(
                host=config.metrics_host,
                max_connections=MOST_CONNECTIONS,
                max_connections_per_address=MOST_CONNECTIONS,
                head_timeout=config.head_timeout,
                body_timeout=config.body_timeout,
            )
        )

    @property
    def sentence(self) -> str:
        """For the operator."""
        return f"Metrics without a key: {_url(self.holder, 'http')}/metrics"

    def open(self, app: FastAPI, server: uvicorn.Server) -> None:
        """Connections are among those of `server`, which closes them when it stops."""
        config = _config(app, lifespan="off")
        config.load()
        beside = uvicorn.Server(config)
        beside.lifespan = config.lifespan_class(config)
        beside.server_state = server.server_state
        self._door.open(self.holder, beside, ConnectionMeters())

    def close(self) -> None:
        self._door.close()
        self.holder.close()


# ── listen ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Say = Callable[[str], None]

# Connections that wait until the server accepts them.
_BACKLOG = 2048
# How long a client may take to read the end of its answer after all requests have ended.
_READ_S = 2


class GracefulServer(uvicorn.Server):
    """A server that lets open answers end before it stops.

    After the first signal, open requests go on and new ones get 503. The second signal ends the open requests. The
    third does not even wait until their clients have read the end.
    """

    def __init__(
        self,
        app: FastAPI,
        service: EngineClient,
        door: Door,
        drain_s: float,
        say: Say,
        metrics_port: MetricsPort | None = None,
    ) -> None:
        super().__init__(_config(app, lifespan="on", timeout_graceful_shutdown=_READ_S))
        self._service, self._door, self._drain_s, self._say = service, door, drain_s, say
        self._meters: ConnectionMeters = app.state.connections
        self._metrics_port = metrics_port
        self._app = app
        self._signals = 0
        self.is_serving = False
        self.accepts = threading.Event()  # connections
        self.lost_reason = ""  # why an engine that served stays down
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def was_told_to_stop(self) -> bool:
        return self._signals > 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup([])  # starts the application; uvicorn itself accepts no connection
        for listener in sockets or []:
            self._door.open(listener, self, self._meters)
        if self._metrics_port:
            self._metrics_port.open(self._app.state.metrics_app, self)
        self.accepts.set()
        if self.was_told_to_stop:
            self._begin_stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._door.close()
        if self._metrics_port:
            self._metrics_port.close()
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves the application as it is then: its processes would stay, and its end be a traceback.
            await self.lifespan.shutdown()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second. A server whose engine stays down ends, once its clients have read that."""
        if self.is_serving and (state := self._service.state).phase is ServicePhase.DOWN:
            self.lost_reason, self.should_exit = state.reason, True
        return await super().on_tick(counter)

    def handle_exit(self, _signal: int, _frame: FrameType | None) -> None:
        """Runs as a signal handler, in the middle of any code, so it leaves the work to the event loop."""
        self._signals += 1
        if self.started:
            self._loop.call_soon_threadsafe(self._stop_now if self._signals > 1 else self._begin_stop)

    def _begin_stop(self) -> None:
        notify("STOPPING=1")
        self._service.close()  # before it is said: a client that reads it may try at once whether it is so
        if self._service.open_requests:
            self._say(
                f"Rota is stopping: {self._service.open_requests} requests have {self._drain_s:g} seconds to end; "
                "a second signal ends them at once."
            )
        self._tasks.append(self._loop.create_task(self._stop_gracefully()))

    async def _stop_gracefully(self) -> None:
        await asyncio.to_thread(self._service.drain, self._drain_s)
        # This aborts the requests that are still open, and the last event of each answer says so.
        await asyncio.to_thread(self._service.stop)
        self.should_exit = True

    def _stop_now(self) -> None:
        self._tasks.append(self._loop.create_task(asyncio.to_thread(self._service.stop)))
        self.force_exit = self._signals > 2


def listen(
    holder: socket.socket,
    app: FastAPI,
    service: EngineClient,
    config: ServerConfig,
    announce: Callable[[str], None],
    say: Say = print,
    door: Door | None = None,
    metrics_port: MetricsPort | None = None,
) -> None:
    """Serve on a held port until SIGINT or SIGTERM. `announce` gets the URL when the server is ready.

    Raises RotaError with the reason if the service cannot start, or EngineLostError if it stays down later.
    """
    _begin(holder, _BACKLOG, config.host, config.port)
    if metrics_port:
        _begin(metrics_port.holder, _METRICS_BACKLOG, config.metrics_host, config.metrics_port or 0, METRICS_FLAGS)
    door = door or Door(config)
    server = GracefulServer(app, service, door, config.drain_timeout, say, metrics_port)
    failures: list[RotaError] = []

    def wait() -> None:
        try:
            service.wait_until_ready()
            server.accepts.wait()  # an engine that starts early may be ready first
            freeze_heap()
            server.is_serving = True
            announce(_url(holder, door.scheme))
            notify("READY=1")
        except RotaError as error:
            if not server.was_told_to_stop:
                failures.append(error)
                server.should_exit = True

    threading.Thread(target=wait, name="rota-announce", daemon=True).start()
    server.run([holder])
    if failures:
        raise failures[0]
    if server.lost_reason:
        raise EngineLostError(server.lost_reason)


def _begin(holder: socket.socket, backlog: int, host: str, port: int, flags: str = PORT_FLAGS) -> None:
    try:
        holder.listen(backlog)
    except OSError as error:  # two servers may hold a port on which neither listens; the first to listen gets it
        raise taken(host, port, error, flags) from error


def _url(holder: socket.socket, scheme: str) -> str:
    host, port = holder.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
