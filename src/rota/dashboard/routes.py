"""The dashboard's routes serve the page and its parts, its live data, and journals to replay."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import msgspec
from fastapi import Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from starlette.exceptions import HTTPException

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.messages import Explain, Inspect
from rota.dashboard.feed import AlreadySent, Feed
from rota.dashboard.window import BIN_S, SPANS_S
from rota.runtime.service import ServicePhase
from rota.server.access.access import Right
from rota.server.context import AppContext
from rota.server.route import Handler, HttpRoute, get

# ── stream ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A stream sends four frames a second to one reader; a slow reader gets fewer, and always the newest.

FRAME_S = 0.25
# Between two questions why the requests on the page wait. An engine walks through a queue for each of them.
EXPLAIN_S = 1.0


class Viewers:
    """The open pages. While there are any, the engine is asked for its state, once for all of them."""

    def __init__(self, feed: Feed, ask: Callable[[Inspect | Explain], None]) -> None:
        """`ask` sends a query to the engine. It may raise RequestError while the engine is down."""
        self._feed = feed
        self._ask = ask
        self._asked_at = self._explained_at = float("-inf")
        self.count = 0

    async def frames(
        self, may_load: bool, is_admitted: Callable[[], bool] = lambda: True, window_s: int = SPANS_S[0]
    ) -> AsyncIterator[bytes]:
        """Server-sent events until the server stops, or the viewer is admitted no longer.

        A frame is made when the last one has left, so none waits.
        """
        self.count += 1
        try:
            seen = AlreadySent()
            while is_admitted():
                now = time.monotonic()
                self._begin_moment(now)
                frame, seen = self._feed.frame(now, seen, may_load, window_s)
                yield b"data: " + msgspec.json.encode(frame) + b"\n\n"
                if frame.phase == ServicePhase.STOPPED:
                    return
                await asyncio.sleep(FRAME_S)
        finally:
            self.count -= 1

    def _begin_moment(self, now: float) -> None:
        """The engine's answers go to the feed, and the next frame shows them."""
        if now - self._asked_at < 0.9 * FRAME_S:
            return  # another viewer has just begun it
        self._asked_at = now
        self._feed.advance(now)
        with suppress(RequestError):  # the engine is down, and the frame says so
            self._ask(Inspect(now))
            if now - self._explained_at >= EXPLAIN_S:
                self._explained_at = now
                for request_id in self._feed.unclear():
                    self._ask(Explain(request_id, now))


def connect(feed: Feed, context: AppContext) -> None:
    """What the page shows of a server beside its events."""
    feed.routes = lambda: context.traffic.routes
    feed.shortages = lambda: context.pressure.shortages(time.monotonic()).values()
    feed.used_limits = context.access.used_limits


async def keep_history(feed: Feed) -> None:
    """Also without a page, so that the history has no gap, and tells of an engine that was away for a moment."""
    while True:
        feed.advance(time.monotonic())
        await asyncio.sleep(BIN_S)


MOST_VIEWERS = 50

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


def routes_of(viewers: Viewers, journal_dir: str | None = None) -> tuple[HttpRoute, ...]:
    """The page's routes. The page and its parts are not secret, and a browser cannot send a key for them."""
    static = files("rota.dashboard").joinpath("static")
    parts = {one.name: one.read_bytes() for one in static.iterdir() if Path(one.name).suffix in KINDS}

    async def page(_: AppContext) -> Response:
        """The page. Its data needs a key."""
        return _part(parts, "index.html")

    async def part(_: AppContext, name: str) -> Response:
        """The page's scripts and styles."""
        return _part(parts, name)

    async def events(context: AppContext, http: Request) -> Response:
        """The page's frames, four a second, as server-sent events; `window` is the time that the figures are of."""
        if viewers.count >= MOST_VIEWERS:
            message = f"{MOST_VIEWERS} pages are open already; close one of them."
            raise RequestError(Fault(FaultCode.QUEUE_FULL, message))
        may_load = context.access.key_of(http).may_load

        def is_admitted() -> bool:
            """This stream has no end of its own, and the viewer's key may be removed meanwhile."""
            with suppress(RequestError):
                return context.access.operator_of(http).may_operate
            return False

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        frames = viewers.frames(may_load, is_admitted, _window_of(http))
        return StreamingResponse(frames, media_type="text/event-stream", headers=headers)

    async def journal(_: AppContext, name: str) -> Response:
        """A journal from `--journal-dir`, to replay on the page."""
        if journal_dir is None:
            raise HTTPException(404, "this server keeps no journals (--journal-dir)")
        path = Path(journal_dir) / name
        if not _JOURNAL.fullmatch(name) or not path.is_file():
            raise HTTPException(404, "there is no such journal; journals are files whose names end in .jsonl")
        return FileResponse(path, media_type="application/jsonl", headers={"Cache-Control": "no-cache"})

    return (
        _shown("/dashboard", Right.NONE, page),
        _shown("/dashboard/events", Right.OPERATE, events),
        _shown("/dashboard/journals/{name}", Right.OPERATE, journal),
        _shown("/dashboard/{name}", Right.NONE, part),
    )


def _shown(path: str, right: Right, handler: Handler) -> HttpRoute:
    """A route for the page, and no part of what programs may ask."""
    return get(path, right, handler, also=(f"HEAD {path}",), is_in_schema=False)


def _window_of(http: Request) -> int:
    """The seconds that figures and charts are of. Raises RequestError for others than there are."""
    asked = http.query_params.get("window", str(SPANS_S[0]))
    if asked not in map(str, SPANS_S):
        known = " or ".join(map(str, SPANS_S))
        raise RequestError.bad_field("window", f"window must be {known}, in seconds.")
    return int(asked)


def _part(parts: dict[str, bytes], name: str) -> Response:
    if name not in parts:
        raise HTTPException(404, "the dashboard has no such part")
    return Response(parts[name], media_type=KINDS[Path(name).suffix], headers=HEADERS)
