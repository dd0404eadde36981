"""The dashboard's routes: one page and its parts from this package, its live data, and journals to replay."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from starlette.exceptions import HTTPException

from rota.core.errors import Fault, FaultCode, RequestError
from rota.dashboard.stream import Gallery

MOST_VISITORS = 50

# The page may load its own parts and speak to its own server, and nothing else.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_JOURNAL = re.compile(r"[\w-][\w.-]*\.jsonl")


class Visitor(Protocol):
    """Who watches."""

    @property
    def may_load(self) -> bool: ...


def install_dashboard(
    app: FastAPI, gallery: Gallery, admit: Callable[[Request], Visitor], journal_dir: str | None = None
) -> None:
    """Add the page to an application.

    `admit` says who asks for data, or raises RequestError. The page and its parts are no secret, and a browser cannot
    send a key for them: they are plain routes, outside whatever the application demands of its others.
    """
    static = files("rota.dashboard").joinpath("static")
    parts = {one.name: one.read_bytes() for one in static.iterdir() if Path(one.name).suffix in KINDS}

    async def page(_: Request) -> Response:
        """The page; its data needs a key."""
        return _part(parts, "index.html")

    async def part(http: Request) -> Response:
        """The page's scripts and styles."""
        return _part(parts, http.path_params["name"])

    async def events(http: Request) -> Response:
        """What the page shows, four times a second, as server-sent events."""
        visitor = admit(http)
        if gallery.visitors >= MOST_VISITORS:
            message = f"{MOST_VISITORS} pages are open already; close one of them."
            raise RequestError(Fault(FaultCode.QUEUE_FULL, message))
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(gallery.frames(visitor.may_load), media_type="text/event-stream", headers=headers)

    async def journal(http: Request) -> Response:
        """A journal of `--journal-dir`, to be replayed on the page."""
        admit(http)
        name = http.path_params["name"]
        if journal_dir is None:
            raise HTTPException(404, "this server keeps no journals (--journal-dir)")
        path = Path(journal_dir) / name
        if not _JOURNAL.fullmatch(name) or not path.is_file():
            raise HTTPException(404, "there is no such journal, a file whose name ends in .jsonl")
        return FileResponse(path, media_type="application/jsonl", headers={"Cache-Control": "no-cache"})

    app.add_route("/dashboard", page)
    app.add_route("/dashboard/events", events)
    app.add_route("/dashboard/journals/{name}", journal)
    app.add_route("/dashboard/{name}", part)


def _part(parts: dict[str, bytes], name: str) -> Response:
    if name not in parts:
        raise HTTPException(404, "the dashboard has no such part")
    return Response(parts[name], media_type=KINDS[Path(name).suffix], headers=HEADERS)
