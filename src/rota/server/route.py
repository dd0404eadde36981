"""A route is a value: how it is asked, who may ask, what it takes and gives, and the function that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from inspect import getdoc
from itertools import islice
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from rota.server.access.access import Access, Right
from rota.server.docs import gives, takes

# Gets the application's context and the HTTP request, and what FastAPI reads from the path and the query by name.
# Its docstring is its sentence in the documents.
Handler = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """`also` are other names of the same, such as "GET /old_name", which the schema leaves out.

    An answer without a model is a text, or JSON with fields of its own.
    """

    method: str
    path: str
    right: Right
    handler: Handler
    takes: type[BaseModel] | None = None  # its body
    gives: type[Any] | None = None  # its answer: a model or a dataclass
    events: type[BaseModel] | None = None  # those of its stream
    also: tuple[str, ...] = ()
    is_text: bool = False
    is_in_schema: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Each method with its path, the first one first."""
        return (f"{self.method} {self.path}", *self.also)


get, post, put, delete = (partial(HttpRoute, method) for method in ("GET", "POST", "PUT", "DELETE"))


def add_routes(app: FastAPI, routes: Iterable[HttpRoute], context: Any, access: Access) -> None:
    """Serve routes for the clients that `access` lets in. The first route that fits a path gets the call."""
    for route in routes:
        described: dict[str, Any] = {
            "name": route.handler.__name__,
            "description": getdoc(route.handler),
            "responses": gives(route.gives, route.events) if route.gives else None,
            "openapi_extra": takes(route.takes) if route.takes else None,
            **({"response_class": PlainTextResponse} if route.is_text else {}),
            "dependencies": [Depends(access.guard(route.right, is_question=route.method == "GET"))],
        }
        for name in route.names:
            method, path = name.split(" ")
            is_shown = route.is_in_schema and name == route.names[0]
            answer = partial(route.handler, context)
            app.add_api_route(path, answer, methods=[method], include_in_schema=is_shown, **described)


# ── long lists ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Long lists are written in portions: between two of them the tokens of other clients leave.

# Entries that are made in one go. A hundred take about a millisecond.
PORTION = 100


async def list_response(before: str, entries: Iterable[Any]) -> Response:
    """JSON of a list with what stands before it, such as '{"data":'. Entries are made while the list is written."""
    written: list[bytes] = []
    remaining = iter(entries)
    while portion := list(islice(remaining, PORTION)):
        written.append(msgspec.json.encode(portion)[1:-1])
        await asyncio.sleep(0)
    return Response(b"%b[%b]}" % (before.encode(), b",".join(written)), media_type="application/json")
