"""Every call has a name, the client's own or a new one, and every response carries it."""

from __future__ import annotations

import re
import uuid

from fastapi import Request as HttpRequest

from rota.core.errors import RequestError

HEADER = "X-Request-Id"
# Characters that a URL and a log line can hold unchanged.
_NAME = re.compile(r"[A-Za-z0-9_.:@=+-]{1,128}")


def name_in(http: HttpRequest) -> str:
    """The call's name from its header, or a new name. Raises RequestError for a bad name."""
    given = http.headers.get(HEADER)
    return keep_name(http, uuid.uuid4().hex if given is None else checked_name(HEADER, given))


def keep_name(http: HttpRequest, name: str) -> str:
    """Set the call's name."""
    http.state.call_name = name
    return name


def kept_name(http: HttpRequest) -> str:
    """The name for a refusal. A call may be refused before its name was read."""
    if name := getattr(http.state, "call_name", None):
        return str(name)
    given = http.headers.get(HEADER, "")
    return given if _NAME.fullmatch(given) else uuid.uuid4().hex


def checked_name(param: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        message = f"{param} must be 1 to 128 letters, digits or any of _ . : @ = + -, not {name[:200]!r}."
        raise RequestError.bad_field(param, message)
    return name
