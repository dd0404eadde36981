"""Browsers let a page of another site read answers, and send more than a form could, if the server says so (CORS)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from rota.server.names import HEADER as NAME
from rota.server.version_header import HEADER as VERSION

METHODS = ("GET", "POST", "PUT", "DELETE")
# Of an answer's headers, those that a page may read besides the few that every page may.
SHOWN = (NAME, VERSION, "Retry-After")


class BrowsersApp(FastAPI):
    """An application that tells browsers whose pages may use it. Who may ask is decided by `Access` alone.

    Browsers are never told to send cookies or passwords of their own: keys come in headers that a page must know.
    """

    def __init__(self, allowed_origins: Collection[str], **options: Any) -> None:
        super().__init__(**options)
        self._allowed_origins = allowed_origins

    def build_middleware_stack(self) -> ASGIApp:
        """Around all else: without the headers a browser would hide from its page why an answer is 500."""
        stack = super().build_middleware_stack()
        if not self._allowed_origins:
            return stack
        return CORSMiddleware(stack, self._allowed_origins, METHODS, ["*"], expose_headers=SHOWN)
