"""A request's body has a largest size, with or without a Content-Length, and is not compressed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rota.core.errors import Fault, FaultCode, RequestError

# Where bodies may hold an adapter's weights.
VERSIONS, FROM_TENSORS = "/v1/adapters/", "/load_lora_adapter_from_tensors"


class BodyLimit:
    """Refuses a body at the first byte beyond the limit and keeps no more. Reading the body raises the error."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_weights_bytes: int | None = None) -> None:
        """Bodies with an adapter's weights have a limit of their own; None: there are none."""
        self._app = app
        self._max_bytes = max_bytes
        self._max_weights_bytes = max_weights_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        announced = int(headers.get("content-length", 0))
        encoding = headers.get("content-encoding", "identity")
        most_bytes, flag = self._limit_of(scope, headers)
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            if encoding.lower() != "identity":
                detail = f"the body is encoded as '{encoding[:200]}'; send it uncompressed, without Content-Encoding"
                raise HTTPException(415, detail)
            if announced > most_bytes:
                raise _too_large(most_bytes, flag)
            message = await receive()
            received += len(message.get("body", b""))
            if received > most_bytes:
                raise _too_large(most_bytes, flag)
            return message

        await self._app(scope, receive_within_limit, send)

    def _limit_of(self, scope: Scope, headers: Headers) -> tuple[int, str]:
        """The largest size of a body, and the flag that sets it."""
        if self._max_weights_bytes is not None and _has_weights(scope, headers):
            return self._max_weights_bytes, "--max-adapter-body-mb"
        return self._max_bytes, "--max-body-mb"


def _too_large(most_bytes: int, flag: str) -> RequestError:
    message = f"The body is larger than {most_bytes / 2**20:g} MB, the limit set by {flag}."
    return RequestError(Fault(FaultCode.BODY_TOO_LARGE, message))


def _has_weights(scope: Scope, headers: Headers) -> bool:
    """JSON that names a folder is small, as all JSON is but SGLang's with weights in it."""
    path: str = scope["path"]
    is_json = headers.get("content-type", "application/json").startswith("application/json")
    return path == FROM_TENSORS or (scope["method"] == "PUT" and path.startswith(VERSIONS) and not is_json)
