"""A request's body has a largest size, with or without a Content-Length, and is not compressed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rota.core.errors import Fault, FaultCode, RequestError


class BodyLimit:
    """Refuses a body at the first byte beyond the limit and keeps no more. Reading the body raises the error."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        announced = int(headers.get("content-length", 0))
        encoding = headers.get("content-encoding", "identity")
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            if encoding.lower() != "identity":
                detail = f"the body is encoded as '{encoding[:200]}'; send it uncompressed, without Content-Encoding"
                raise HTTPException(415, detail)
            if announced > self._max_bytes:
                raise self._refusal()
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._refusal()
            return message

        await self._app(scope, receive_within_limit, send)

    def _refusal(self) -> RequestError:
        limit = f"{self._max_bytes / 2**20:g} MB"
        return RequestError(
            Fault(FaultCode.BODY_TOO_LARGE, f"The body is larger than {limit}, the limit set by --max-body-mb.")
        )
