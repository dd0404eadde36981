"""GET /v1/models: what a request may name, the base model first."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI

from rota.core.adapter import Adapter
from rota.runtime.registry import Registry
from rota.runtime.service import Service


def install_model_routes(app: FastAPI, service: Service, registry: Registry) -> None:
    created = int(time.time())

    def entry(model: Adapter) -> dict[str, Any]:
        capacity = service.state.capacity
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "rota",
            "root": model.path,
            "parent": None if model is registry.base else registry.base.name,
            "max_model_len": capacity and capacity.max_sequence_tokens,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry(model) for model in (registry.base, *registry.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return entry(registry.find(name))
