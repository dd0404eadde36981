"""A raw error is a whole HTTP response in bytes, for a connection that the application never sees."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from rota.core.errors import Fault
from rota.server.errors import ERROR_KINDS, error_body


def raw_error(fault: Fault) -> bytes:
    """The same body as any other error. The connection ends with it."""
    kind = ERROR_KINDS[fault.code]
    body = msgspec.json.encode(error_body(fault))
    head = [
        f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *([] if kind.retry_after_s is None else [f"retry-after: {kind.retry_after_s}"]),
    ]
    return "\r\n".join([*head, "\r\n"]).encode() + body
