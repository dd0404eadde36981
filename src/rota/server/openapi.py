"""What /docs shows: bodies are parsed by `read_body`, so routes say here which fields they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_COMPONENTS = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every refusal looks like."""

    error: ErrorDetail


# For the whole application; a stream that has begun ends with the same body as its last event.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused, and why."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer, and why."},
}


def takes(*kinds: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is one of these."""
    schemas = [kind.model_json_schema(ref_template=_COMPONENTS) for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def gives(kind: type[BaseModel], event: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: what it answers with, and the events of its streams."""
    answer: dict[str, Any] = {"model": kind, "description": kind.__doc__ or ""}
    if event:
        schema = event.model_json_schema(ref_template=_COMPONENTS)
        answer["content"] = {
            "text/event-stream": {
                "schema": {"type": "string", "description": "Events of JSON, then `data: [DONE]`."},
                "x-event": schema,
            }
        }
    return {200: answer}


def install_openapi(app: FastAPI) -> None:
    """Objects inside of bodies are described among the components, where references look for them."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        described = describe()
        _hoist(described, described.setdefault("components", {}).setdefault("schemas", {}))
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _hoist(node: Any, schemas: dict[str, Any]) -> None:
    if isinstance(node, dict):
        schemas.update(node.pop("$defs", {}))
        children: Sequence[Any] = list(node.values())
    else:
        children = node if isinstance(node, list) else ()
    for child in children:
        _hoist(child, schemas)
