"""An application for tests: with every route, and with defaults for what a test is not about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI

from rota.core.config import EngineConfig, ServerConfig
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.server.access.access import Access
from rota.server.app import ROUTES, create_app, routes_of_dialects
from rota.server.context import AppParts
from rota.server.route import HttpRoute
from rota.text.tokenizer import Tokenizer


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
