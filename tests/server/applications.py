"""An application with every route and defaults for what a test is not about, and a real server for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from rota.core.config import EngineConfig, ServerConfig
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.server.access.access import Access
from rota.server.app import ROUTES, create_app, routes_of_dialects
from rota.server.context import AppParts
from rota.server.door.connection import BoundedConnection
from rota.server.route import HttpRoute
from rota.text.tokenizer import Tokenizer
from tests.waiting import TIMEOUT_S, until


def made_app(
    service: Service,
    tokenizer: Tokenizer,
    registry: Registry,
    access: Access | None = None,
    config: ServerConfig | None = None,
    engine: EngineConfig | None = None,
    more_routes: Iterable[HttpRoute] = (),
    has_grammars: bool = False,
    **parts: Any,
) -> FastAPI:
    """`more_routes` come first, and so in the place of those of the same paths."""
    made = AppParts(
        service=service,
        tokenizer=tokenizer,
        registry=registry,
        access=access or Access(registry),
        config=config or ServerConfig(),
        engine=engine or EngineConfig(),
        has_grammars=has_grammars,
        **parts,
    )
    return create_app(made, [*more_routes, *ROUTES, *routes_of_dialects()])


# What a client does not read soon stays with the server, and whoever writes has to wait.
SEND_BUFFER = 16 * 1024


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The application's URL while it runs in a thread, with connections as `rota serve` has them."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    config = uvicorn.Config(app, http=BoundedConnection, ws="none", log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert until(lambda: server.started or not thread.is_alive()), "the server has not started"
        assert thread.is_alive(), "the server ended before it served"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        listener.close()
        assert not thread.is_alive(), "the server has not stopped"
