"""One table says which HTTP status a fault has; every error leaves in OpenAI's body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rota.core.errors import AdapterError, Fault, FaultCode, RequestError


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How a fault looks to an HTTP client."""

    status: int
    type: str
    retry_after_s: int | None = None


_INVALID = "invalid_request_error"

ERROR_KINDS: dict[FaultCode, ErrorKind] = {
    FaultCode.BAD_FIELD: ErrorKind(400, _INVALID),
    FaultCode.DUPLICATE_ID: ErrorKind(400, _INVALID),
    FaultCode.UNKNOWN_MODEL: ErrorKind(404, _INVALID),
    FaultCode.UNKNOWN_ADAPTER: ErrorKind(404, _INVALID),
    FaultCode.ADAPTER_FAILED: ErrorKind(400, _INVALID),
    FaultCode.PROMPT_TOO_LONG: ErrorKind(413, _INVALID),
    FaultCode.KV_TOO_SMALL: ErrorKind(413, _INVALID),
    FaultCode.QUEUE_FULL: ErrorKind(429, "rate_limit_error", retry_after_s=1),
    FaultCode.ENGINE_DIED: ErrorKind(503, "server_error", retry_after_s=5),
}


class ClientGone(Exception):
    """Nobody is left to answer."""


def error_body(fault: Fault) -> dict[str, Any]:
    return _body(fault.message, ERROR_KINDS[fault.code].type, fault.param, fault.code.value)


def install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(AdapterError)
    async def refuse_adapter(request: Request, error: AdapterError) -> Response:
        return await refuse(request, RequestError(Fault(FaultCode.ADAPTER_FAILED, str(error))))

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        kind = ERROR_KINDS[error.fault.code]
        headers = {} if kind.retry_after_s is None else {"Retry-After": str(kind.retry_after_s)}
        return JSONResponse(error_body(error.fault), kind.status, headers)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        return JSONResponse(_body(message, _INVALID), error.status_code, error.headers)

    @app.exception_handler(ClientGone)
    async def nobody_reads_this(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def our_fault(_: Request, error: Exception) -> Response:
        message = f"The server failed with {type(error).__name__}; its log has the details."
        return JSONResponse(_body(message, "server_error"), 500)


def _body(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
