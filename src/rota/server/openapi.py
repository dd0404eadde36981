"""Routes describe their fields for /docs here, because `read_body` parses bodies and FastAPI does not."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
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
    """The body of every error."""

    error: ErrorDetail


# For the whole application. A stream that has begun sends the same body as its last event. Named by reference, since
# FastAPI makes a reader of its own for every model of every route.
_ERROR = {"application/json": {"schema": {"$ref": _COMPONENTS.format(model=ErrorBody.__name__)}}}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is refused; the body says why.", "content": _ERROR},
    "5XX": {"description": "The server cannot answer; the body says why.", "content": _ERROR},
}


def takes(*kinds: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: the types of its request body."""
    schemas = [_schema_of(kind) for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def gives(kind: type[BaseModel], event: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: its response body, and the events of its streams."""
    answer: dict[str, Any] = {"model": kind, "description": kind.__doc__ or ""}
    if event:
        schema = _schema_of(event)
        answer["content"] = {
            "text/event-stream": {
                "schema": {"type": "string", "description": "Events of JSON, then `data: [DONE]`."},
                "x-event": schema,
            }
        }
    return {200: answer}


@cache
def _schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Made once, however many applications a process makes. FastAPI copies what it describes."""
    return kind.model_json_schema(ref_template=_COMPONENTS)


def install_openapi(app: FastAPI) -> None:
    """Move the objects inside bodies to the components, because references point there."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        described = describe()
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        schemas[ErrorBody.__name__] = deepcopy(_schema_of(ErrorBody))
        _hoist(described, schemas)
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
