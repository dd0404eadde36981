"""A path with two slashes in the place of one means the same: clients join an address and a path in two ways."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("//+")
# Below these an adapter is named, and its name may have two slashes.
_NAMED = re.compile("^/+v1/+(adapters|models|quarantine)(?=/)")


class PlainPaths:
    """Stands before all that looks at a path, so that all see the same one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "//" in scope.get("path", ""):
            path, found = _NAMED.subn(r"/v1/\1", scope["path"])
            scope["path"] = path if found else _SLASHES.sub("/", path)
        await self._app(scope, receive, send)
