"""A second port serves metrics and probes alone, without keys: the endpoint picker of Kubernetes sends none."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import Depends, FastAPI

from rota.core.config import ServerConfig
from rota.core.listen_config import ListenConfig
from rota.observe.connection_meters import ConnectionMeters
from rota.server.access.access import Access
from rota.server.access.exposure import is_loopback
from rota.server.body_limit import BodyLimit
from rota.server.door.connection import BoundedConnection
from rota.server.door.door import Door
from rota.server.errors import install_error_handlers
from rota.server.front import Front
from rota.server.metrics_routes import Scrapes, install_metrics_route
from rota.server.probes import install_probes

# Scrapers are few. An idle connection makes room for another.
MOST_CONNECTIONS = 16
BACKLOG = 128
# No route here reads a body.
MOST_BODY_BYTES = 65_536


def metrics_app(scrapes: Scrapes, front: Front, config: ServerConfig) -> FastAPI:
    """GET /metrics and the probes, for clients without a key; web pages are kept away as from a server without keys."""
    own_name = config.metrics_host if is_loopback(config.metrics_host) else None
    access = Access(front.registry, own_name=own_name)
    app = FastAPI(title="Rota", dependencies=[Depends(access.guard)], docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=MOST_BODY_BYTES)
    install_error_handlers(app)
    install_metrics_route(app, scrapes, access)
    install_probes(app, front)
    return app


class MetricsPort:
    """Opened and closed by the server of the first port, in the same event loop."""

    def __init__(self, holder: socket.socket, config: ServerConfig) -> None:
        self._holder = holder
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
        host, port = self._holder.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"Metrics without a key: http://{shown}:{port}/metrics"

    def listen(self) -> None:
        """Raises OSError if another socket listens there since."""
        self._holder.listen(BACKLOG)

    def open(self, app: FastAPI, server: uvicorn.Server) -> None:
        """Connections are among those of `server`, which closes them when it stops."""
        config = uvicorn.Config(
            app, http=BoundedConnection, ws="none", log_config=None, log_level="warning", lifespan="off"
        )
        config.load()
        beside = uvicorn.Server(config)
        beside.lifespan = config.lifespan_class(config)
        beside.server_state = server.server_state
        self._door.open(self._holder, beside, ConnectionMeters())

    def close(self) -> None:
        self._door.close()
        self._holder.close()
