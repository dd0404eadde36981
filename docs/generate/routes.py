"""Routes as the application has them: paths, what they do, whose key they take, and the fields of their bodies."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from fnmatch import fnmatch
from functools import cache
from inspect import cleandoc
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI
from starlette.routing import Route

from docs.generate.tables import code, listed
from rota.core.config import EngineConfig
from rota.dashboard.routes import install_dashboard
from rota.runtime.registry import Registry
from rota.runtime.service import InProcessService
from rota.server.app import create_app


class Right(Enum):
    """What a key must be allowed, on a server that has keys; tests/docs/test_routes.py asks every route if it is so."""

    NONE = "no key is needed"
    ANY = "any"
    MODEL = "any that may use the model"
    OWN = "any, for requests of its own; with `may_operate` for all requests"
    LOAD = "`may_load`, the name on its list, and no other key's adapter"
    OPERATE = "`may_operate`"


RIGHTS = {
    "/v1/completions": Right.MODEL,
    "/v1/chat/completions": Right.MODEL,
    "/v1/responses": Right.MODEL,
    "/v1/messages": Right.MODEL,
    "/v1/messages/count_tokens": Right.MODEL,
    "/api/chat": Right.MODEL,
    "/api/tags": Right.ANY,
    "/api/version": Right.ANY,
    "/tokenizer_info": Right.ANY,
    "/v1/embeddings": Right.MODEL,
    "/v1/score": Right.MODEL,
    "/v1/rerank": Right.MODEL,
    "/generate": Right.MODEL,
    "/v1/tokenize": Right.MODEL,
    "/v1/detokenize": Right.MODEL,
    "/v1/models": Right.ANY,
    "/v1/models/{name:path}": Right.MODEL,
    "/v1/requests/{id}": Right.OWN,
    "/abort_request": Right.OWN,
    "/v1/load_lora_adapter": Right.LOAD,
    "/v1/unload_lora_adapter": Right.LOAD,
    "/load_lora_adapter": Right.LOAD,
    "/unload_lora_adapter": Right.LOAD,
    "/load_lora_adapter_from_tensors": Right.LOAD,
    "/v1/adapters": Right.ANY,
    "/v1/adapters/{name:path}": Right.MODEL,
    "PUT /v1/adapters/{name:path}": Right.LOAD,
    "DELETE /v1/adapters/{name:path}": Right.LOAD,
    "PUT /v1/adapters/{name:path}/route": Right.LOAD,
    "/v1/adapters/{name:path}/route": Right.LOAD,
    "DELETE /v1/adapters/{name:path}/route": Right.LOAD,
    "/v1/routes": Right.ANY,
    "/v1/quarantine": Right.OPERATE,
    "DELETE /v1/quarantine/adapters/{name:path}": Right.OPERATE,
    "DELETE /v1/quarantine/keys/{name}": Right.OPERATE,
    "/health": Right.NONE,
    "/readyz": Right.NONE,
    "/livez": Right.NONE,
    "/health_generate": Right.ANY,
    "/model_info": Right.ANY,
    "/server_info": Right.OPERATE,
    "/flush_cache": Right.OPERATE,
    "/pause": Right.OPERATE,
    "/resume": Right.OPERATE,
    "/is_paused": Right.OPERATE,
    "/get_world_size": Right.OPERATE,
    "/metrics": Right.OPERATE,
    "/dashboard": Right.NONE,
    "/dashboard/{name}": Right.NONE,
    "/dashboard/events": Right.OPERATE,
    "/dashboard/journals/{name}": Right.OPERATE,
}


@cache
def application() -> FastAPI:
    """The application as `rota serve` makes it, to be described and never asked: its service is never started."""
    nothing, no_tokenizer = cast(Any, None), cast(Any, SimpleNamespace(folder=None))
    app = create_app(InProcessService(nothing, EngineConfig()), no_tokenizer, Registry("model", "/model"))
    install_dashboard(app, nothing, nothing)
    return app


@cache
def all_routes() -> dict[str, list[Route]]:
    """Every route by its path, with the other names of the same one. Routes that put or delete have that before it."""
    app = application()
    found: dict[Any, list[Route]] = {}
    for route in app.routes:
        assert isinstance(route, Route)
        if route.path not in ("/docs", app.openapi_url):
            found.setdefault(route.endpoint, []).append(route)
    # Decorators are applied from below: the name that the schema has was given last.
    return {_key(entry[-1]): entry[::-1] for entry in found.values()}


def _key(route: Route) -> str:
    """One path may have several routes, each with a method of its own."""
    methods = set(route.methods or ())
    return route.path if methods & {"GET", "POST"} else f"{min(methods)} {route.path}"


def routes(*patterns: str) -> str:
    """A section for each route whose path fits one of the patterns."""
    known = all_routes()
    chosen = {path: known[path] for pattern in patterns for path in known if fnmatch(path, pattern)}
    return "\n\n".join(_section(path, entry) for path, entry in chosen.items())


def _section(path: str, entry: list[Route]) -> str:
    names = [
        f"{method} {_shown(route.path)}" for route in entry for method in sorted(set(route.methods or ()) - {"HEAD"})
    ]
    also = f" Also {', '.join(map(code, names[1:]))}." if names[1:] else ""
    sentence = cleandoc(entry[0].endpoint.__doc__ or "")
    lines = [f"#### {code(names[0])}", "", sentence + also, "", f"- Key: {RIGHTS[path].value}."]
    if body := (getattr(entry[0], "openapi_extra", None) or {}).get("requestBody"):
        lines += _fields("Body", body["content"]["application/json"]["schema"])
    if answer := getattr(entry[0], "responses", {}).get(200, {}).get("model"):
        lines.append(f"- Answer: {listed(_object_in(answer.model_json_schema())['properties'])}.")
    return "\n".join(lines)


def _object_in(schema: dict[str, Any]) -> dict[str, Any]:
    """What an answer is, or is a list of."""
    if "properties" in schema:
        return schema
    definitions: dict[str, Any] = schema.pop("$defs")
    return cast(dict[str, Any], definitions[next(_references(schema))])


def _shown(path: str) -> str:
    return path.replace(":path}", "}")


def _fields(title: str, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """The names of an object's fields, those that are required first, and then those of the objects in it."""
    fields = schema["properties"]
    required = [f"**{code(name)}**" for name in schema.get("required", ())]
    refused = [name for name, field in fields.items() if "Not supported" in field.get("description", "")]
    others = [code(name) for name in fields if name not in (*schema.get("required", ()), *refused)]
    note = f"; known, and refused unless empty: {listed(refused)}" if refused else ""
    yield f"- {title}: {', '.join(required + others)}{note}."
    for name, field in fields.items():
        for reference in dict.fromkeys(_references(field)):
            inner = application().openapi()["components"]["schemas"][reference]
            yield from _fields(code(path + name), inner, f"{path}{name}.")


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for child in node.values():
            yield from _references(child)
    elif isinstance(node, list):
        for child in node:
            yield from _references(child)
