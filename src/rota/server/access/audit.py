"""An act that changes the server for others is written to the audit log, also if it is refused or fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request

from rota.observe.audit import log_act
from rota.server.access.keys import Key


@contextmanager
def audited(http: Request, key: Key, action: str, **details: Any) -> Iterator[dict[str, Any]]:
    """Log what the block does, at its end. The block may add details."""
    client = client_of(http)
    try:
        yield details
    except BaseException as error:  # also CancelledError: every way out has its line
        log_act(action, key.name, client, str(error) or type(error).__name__, **details)
        raise
    log_act(action, key.name, client, **details)


def client_of(http: Request) -> str:
    """The address of a request's client."""
    return http.client.host if http.client else "unknown"
