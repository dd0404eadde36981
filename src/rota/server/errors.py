"""One table gives every fault its HTTP status, and every error is sent in OpenAI's body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rota.core.errors import AdapterError, Fault, FaultCode, RequestError
from rota.server.call import HEADER, kept_name

# What a status means to a client; of all others, that the request is wrong, or from 500 on that the server is at fault.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}


def error_type(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How a fault looks to an HTTP client."""

    status: int
    meaning: str  # as docs/serving.md shows it; a client's message describes its own case
    retry_after_s: int | None = None

    @property
    def type(self) -> str:
        return error_type(self.status)


ERROR_KINDS: dict[FaultCode, ErrorKind] = {
    FaultCode.BAD_FIELD: ErrorKind(400, "A field is missing, wrong, unknown or not supported; `param` names it."),
    FaultCode.DUPLICATE_ID: ErrorKind(400, "A request of this id is open already."),
    FaultCode.UNKNOWN_MODEL: ErrorKind(
        404, "No model or adapter of this name is loaded; the message lists those that are."
    ),
    FaultCode.UNKNOWN_ADAPTER: ErrorKind(404, "The adapter was unloaded before the request could start."),
    FaultCode.UNKNOWN_REQUEST: ErrorKind(404, "No request of this id is open, or it is another key's."),
    FaultCode.ADAPTER_FAILED: ErrorKind(400, "The adapter cannot be loaded, unloaded or served."),
    FaultCode.ADAPTER_CHANGED: ErrorKind(409, "The files of the adapter are others than when this version was loaded."),
    FaultCode.QUARANTINED: ErrorKind(
        503, "Engines died while they read this adapter; an operator may lift the quarantine."
    ),
    FaultCode.NOT_PAUSED: ErrorKind(409, "The server was resumed while /pause waited for its answers."),
    FaultCode.PROMPT_TOO_LONG: ErrorKind(400, "The prompt does not fit the context, or the whole KV cache."),
    FaultCode.BODY_TOO_LARGE: ErrorKind(
        413, "The body is larger than `--max-body-mb`, holds too many values, or takes too long to read."
    ),
    FaultCode.BODY_TOO_SLOW: ErrorKind(408, "The body did not arrive within `--body-timeout`."),
    FaultCode.UNAUTHORIZED: ErrorKind(401, "The key is missing or not known."),
    FaultCode.FORBIDDEN: ErrorKind(403, "The key may not do this, or may not use this name."),
    FaultCode.KEY_FULL: ErrorKind(
        403, "The key's adapters take as much as they may: `max_adapters`, `max_adapter_bytes`, or a fair share."
    ),
    FaultCode.RATE_LIMITED: ErrorKind(
        429, "The key has used up its minute, or its open answers hold too many tokens.", retry_after_s=1
    ),
    FaultCode.QUEUE_FULL: ErrorKind(
        429,
        "Too many requests or large bodies wait (`--max-queued-requests`, or the key's `max_queued`), the key "
        "sends too many adapters (`max_uploads`), or too many dashboards are open.",
        retry_after_s=1,
    ),
    FaultCode.NOT_A_NUMBER: ErrorKind(
        500, "The model or the adapter computed a value that is not a number; a retry will not help."
    ),
    FaultCode.DISK_FAILED: ErrorKind(
        500, "A disk of the server cannot be written, or fails; operators are told which."
    ),
    FaultCode.SOURCE_AWAY: ErrorKind(
        502, "The source of an adapter cannot be reached, or does not answer in time.", retry_after_s=5
    ),
    FaultCode.ENGINE_DIED: ErrorKind(503, "The engine is down, or died under the request.", retry_after_s=5),
    FaultCode.TEXT_WORKER_DIED: ErrorKind(
        503, "The process that read the body died, perhaps for lack of memory.", retry_after_s=5
    ),
    FaultCode.STOPPING: ErrorKind(503, "The server is stopping.", retry_after_s=5),
    FaultCode.TOO_MANY_CONNECTIONS: ErrorKind(
        503, "Too many connections are busy (`--max-connections`, `--max-connections-per-address`).", retry_after_s=1
    ),
    FaultCode.TIMED_OUT: ErrorKind(504, "The request took longer than `--request-timeout`."),
    FaultCode.DISK_FULL: ErrorKind(507, "A disk of the server has no room for an adapter; operators are told which."),
}


class RetryLater(RequestError):
    """A refusal that knows its own retry time, which replaces the table's."""

    def __init__(self, fault: Fault, retry_after_s: int) -> None:
        super().__init__(fault)
        self.retry_after_s = retry_after_s


def error_body(fault: Fault) -> dict[str, Any]:
    return _body(fault.message, ERROR_KINDS[fault.code].status, fault.param, fault.code.value)


# Hears of every error that a client is told: its kind, a sentence that quotes nothing of the client's, and the tenant.
OnError = Callable[[str, str, str], None]


def unheard(_kind: str, _sentence: str, _tenant: str) -> None:
    """Hears of errors, and does nothing."""


def note(on_error: OnError, fault: Fault, tenant: str = "") -> None:
    """The sentence of a client's mistake may quote a prompt, so the meaning of its kind stands for it."""
    kind = ERROR_KINDS[fault.code]
    is_ours = kind.status >= 500 or fault.code is FaultCode.ADAPTER_FAILED
    on_error(fault.code.value, fault.message if is_ours else kind.meaning.replace("`", ""), tenant)


# A body in the shape of a route, from a status and a sentence.
OwnBody = Callable[[int, str], dict[str, Any]]


def install_error_handlers(
    app: FastAPI,
    shown: Callable[[Request, Fault], Fault] = lambda _, fault: fault,
    own_bodies: Mapping[str, OwnBody] | None = None,
    on_error: OnError = unheard,
) -> None:
    """`shown` gives a fault as the client of a request may see it. `own_bodies` are of paths that begin so."""

    def written(request: Request, body: dict[str, Any], status: int, headers: Mapping[str, str]) -> Response:
        for path, own in (own_bodies or {}).items():
            if request.scope["path"].startswith(path):
                body = own(status, body["error"]["message"])
        return JSONResponse(body, status, {HEADER: kept_name(request), **headers})

    @app.exception_handler(AdapterError)
    async def refuse_adapter(request: Request, error: AdapterError) -> Response:
        return await refuse(request, RequestError(shown(request, Fault(error.code, str(error)))))

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        kind = ERROR_KINDS[error.fault.code]
        note(on_error, error.fault, _tenant_of(request))
        return written(request, error_body(shown(request, error.fault)), kind.status, _headers(error, kind))

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        return written(request, _body(message, error.status_code), error.status_code, error.headers or {})

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        param = str(problem["loc"][-1])
        return await refuse(request, RequestError.bad_field(param, f"{param}: {problem['msg']}."))

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        message = f"The server failed with {type(error).__name__}; its log has the details."
        on_error("internal_error", message, _tenant_of(request))
        return written(request, _body(message, 500), 500, {})


def _tenant_of(request: Request) -> str:
    """The tenant of a call whose key is known, on a server with keys."""
    key = getattr(request.state, "key", None)
    return key.tenant.name if key else ""


def _headers(error: RequestError, kind: ErrorKind) -> dict[str, str]:
    if kind.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    retry_after_s = error.retry_after_s if isinstance(error, RetryLater) else kind.retry_after_s
    return {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}


def _body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}
