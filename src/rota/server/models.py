"""GET /v1/models lists the models that a request may name, the base model first."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from rota.core.adapter import Adapter
from rota.server.access.disclosure import path_for
from rota.server.access.keys import Key
from rota.server.front import Front
from rota.server.long_lists import list_response
from rota.server.openai.bodies import ModelBody, ModelsBody
from rota.server.openapi import gives


def install_model_routes(app: FastAPI, front: Front) -> None:
    """A key sees only the models that it may use."""
    created = int(time.time())
    base = front.registry.base

    def longest() -> int | None:
        capacity = front.service.state.capacity
        return capacity.max_sequence_tokens if capacity else None

    def entry(key: Key, model: Adapter, max_model_len: int | None) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "rota",
            "root": path_for(key, model),
            "parent": None if model is base else base.name,
            "max_model_len": max_model_len,
        }

    @app.get("/v1/models", responses=gives(ModelsBody))
    async def models(http: HttpRequest) -> Response:
        """The values of `model`: the base model first, then its adapters. A key sees only what it may use.

        `root` is the model's folder for operators, and the model's name for other keys.
        """
        key, most = front.access.key_of(http), longest()
        entries = (entry(key, one, most) for one in front.access.visible(key))
        return await list_response('{"object":"list","data":', entries)

    @app.get("/v1/models/{name:path}", responses=gives(ModelBody))
    async def model(name: str, http: HttpRequest) -> dict[str, Any]:
        """One model."""
        key = front.access.key_of(http)
        return entry(key, front.access.find(key, name), longest())
