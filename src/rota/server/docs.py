"""GET /docs shows the schema as one page, without scripts; routes describe their fields for it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, TypeAdapter

from rota.server.calls.fields import MAX_COUNT

# ── openapi ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Routes describe their fields for /docs here, because `read_body` parses bodies and FastAPI does not.

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


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: the type of its request body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema_of(kind)}}}}


def gives(kind: type[Any], event: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: its response body, and the events of its streams."""
    reference = _reference_to(kind)  # type: ignore[arg-type]  # mypy takes `type[Any]` for a type without a hash
    content: dict[str, Any] = {"application/json": {"schema": reference}}
    if event:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Events of JSON, then `data: [DONE]`."},
            "x-event": _schema_of(event),
        }
    return {200: {"description": kind.__doc__ or "", "content": content}}


@cache
def _reference_to(kind: type[Any]) -> dict[str, Any]:
    """With what it refers to. A "model" of a response would have FastAPI make a reader for every application."""
    schema = TypeAdapter(kind).json_schema(ref_template=_COMPONENTS, mode="serialization")
    # A model that refers to itself is among them already.
    components = {kind.__name__: schema} | schema.pop("$defs", {})
    return {"$ref": _COMPONENTS.format(model=kind.__name__), "$defs": components}


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


# ── docs page ───────────────────────────────────────────────────────────────────────────────────────────────────────
# GET /docs shows the schema as one page, without scripts and without files from elsewhere.

Schema = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-family: ui-monospace, monospace; font-size: 13px; }
summary { cursor: pointer; padding: .3rem 0; }
details { border-top: 1px solid #8884; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
td { border-top: 1px solid #8883; padding: .15rem 1rem .15rem 0; vertical-align: top; }
"""
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def install_docs_page(app: FastAPI, path: str = "/docs") -> None:
    @cache
    def content() -> str:
        return render(app.openapi())

    async def docs(_: Request) -> Response:
        """Every route and its fields, for readers."""
        return HTMLResponse(content(), headers=HEADERS)

    app.add_route(path, docs, include_in_schema=False)


def render(described: Schema) -> str:
    """A page of HTML from a schema."""
    routes = [
        _route(f"{method.upper()} {path}", operation)
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    ]
    title = escape(described["info"]["title"])
    schemas = described.get("components", {}).get("schemas", {})
    objects = [_object(name, schemas[name]) for name in sorted(schemas)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'<h1>{title}</h1><p>The same for programs: <a href="/openapi.json">/openapi.json</a>. '
        "Fields in bold are required; null is the same as leaving one out.</p>"
        f"<h2>Routes</h2>{''.join(routes)}<h2>Objects</h2>{''.join(objects)}</html>"
    )


def _route(name: str, operation: Schema) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    answer = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
    parts = [f"<p>{escape(operation.get('description', ''))}</p>"]
    if parameters := operation.get("parameters"):
        rows = [(one["name"], bool(one.get("required")), one["schema"]) for one in parameters]
        parts.append(f"<p>Parameters</p>{_table(rows)}")
    if body:
        parts.append(f"<p>Body</p>{_table(_properties(body))}")
    if answer:
        parts.append(f"<p>Answer: {_kind(answer)}</p>")
    return f"<details><summary><code>{escape(name)}</code></summary>{''.join(parts)}</details>"


def _object(name: str, schema: Schema) -> str:
    about = f"<p>{escape(schema.get('description', ''))}</p>{_table(_properties(schema))}"
    return f'<details open id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{about}</details>'


def _properties(schema: Schema) -> Iterator[tuple[str, bool, Schema]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield name, name in required, field


def _table(rows: Any) -> str:
    cells = [
        f"<tr><td>{f'<b><code>{escape(name)}</code></b>' if is_required else f'<code>{escape(name)}</code>'}"
        f"<td>{_kind(field)}<td>{escape(field.get('description', ''))}"
        for name, is_required, field in rows
    ]
    return f"<table>{''.join(cells)}</table>"


def _kind(field: Schema) -> str:
    """The type of a value in a few words. Objects are described further down the page."""
    if reference := field.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if choices := field.get("anyOf"):
        # Null is the same as no field; the page says so once.
        kinds = " or ".join(dict.fromkeys(_kind(one) for one in choices if one.get("type") != "null"))
        return kinds + _bounds(field)
    if "const" in field or "enum" in field:
        return " or ".join(escape(json.dumps(value)) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return escape(field.get("type", "anything")) + _bounds(field)


def _bounds(field: Schema) -> str:
    """The limits of a number, without those that only say what an integer can hold."""
    words = {"minimum": "at least", "maximum": "at most"}
    bounds = [f" {words[limit]} {field[limit]:g}" for limit in words if abs(field.get(limit, math.inf)) < MAX_COUNT]
    return ",".join(bounds)
