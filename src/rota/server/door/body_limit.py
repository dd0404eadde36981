"""A request's body has a largest size, with or without a Content-Length, and compressed or not."""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rota.core.errors import Fault, FaultCode, RequestError

# Where bodies may hold an adapter's weights.
VERSIONS, FROM_TENSORS = "/v1/adapters/", "/load_lora_adapter_from_tensors"
BODY_FLAG, WEIGHTS_FLAG = "--max-body-mb", "--max-adapter-body-mb"
# So much of a compressed body is unpacked at a time: half a millisecond, between which the event loop is free.
PORTION_BYTES = 256 * 1024


class Unpacked:
    """A body that came as gzip, as it was before. It is never unpacked further than it is read.

    Reading it raises RequestError if it is no gzip, or ends too early or too late.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self._packed = b""
        self._has_all = self._has_more = False  # has all of the packed body arrived; is some of it still packed
        self.packed_bytes = 0

    async def receive(self) -> Message:
        if self._has_all and not self._has_more:
            return await self._receive()  # the body is over, and the next message says that the client left
        if self._has_more:
            await asyncio.sleep(0)
        else:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._packed, self._has_all = message.get("body", b""), not message.get("more_body", False)
            self.packed_bytes += len(self._packed)
        return {"type": "http.request", "body": self._portion(), "more_body": self._has_more or not self._has_all}

    def _portion(self) -> bytes:
        was_over = self._gzip.eof
        try:
            content = b"" if was_over else self._gzip.decompress(self._packed, PORTION_BYTES)
        except zlib.error as error:
            raise _no_gzip(f"is none ({error})") from None
        behind = self._gzip.unused_data or (was_over and self._packed)
        self._packed = self._gzip.unconsumed_tail
        self._has_more = not self._gzip.eof and (bool(self._packed) or len(content) == PORTION_BYTES)
        if behind:
            raise _no_gzip("has more behind its end")
        if self._has_all and not self._has_more and not self._gzip.eof:
            raise _no_gzip("ends too early")
        return content


def _no_gzip(problem: str) -> RequestError:
    message = f"Content-Encoding says gzip, but the body {problem}; send it as gzip, or without Content-Encoding."
    return RequestError(Fault(FaultCode.BAD_FIELD, message))


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
        encoding = headers.get("content-encoding", "identity").lower()
        most_bytes, flag = self._limit_of(scope, headers)
        is_packed = encoding == "gzip" and flag == BODY_FLAG  # weights do not become smaller
        unpacked = Unpacked(receive) if is_packed else None
        source = unpacked.receive if unpacked else receive
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            if encoding != "identity" and not is_packed:
                form = "uncompressed" if flag != BODY_FLAG else "as gzip, or uncompressed"
                raise HTTPException(415, f"the body is encoded as '{encoding[:200]}'; send it {form}")
            if announced > most_bytes:
                raise _too_large(most_bytes, flag)
            message = await source()
            received += len(message.get("body", b""))
            if max(received, unpacked.packed_bytes if unpacked else 0) > most_bytes:
                raise _too_large(most_bytes, flag)
            return message

        await self._app(scope, receive_within_limit, send)

    def _limit_of(self, scope: Scope, headers: Headers) -> tuple[int, str]:
        """The largest size of a body, and the flag that sets it."""
        if self._max_weights_bytes is not None and _has_weights(scope, headers):
            return self._max_weights_bytes, WEIGHTS_FLAG
        return self._max_bytes, BODY_FLAG


def _too_large(most_bytes: int, flag: str) -> RequestError:
    message = f"The body is larger than {most_bytes / 2**20:g} MB, the limit set by {flag}."
    return RequestError(Fault(FaultCode.BODY_TOO_LARGE, message))


def _has_weights(scope: Scope, headers: Headers) -> bool:
    """JSON that names a folder is small, as all JSON is but SGLang's with weights in it."""
    path: str = scope["path"]
    is_json = headers.get("content-type", "application/json").startswith("application/json")
    return path == FROM_TENSORS or (scope["method"] == "PUT" and path.startswith(VERSIONS) and not is_json)
