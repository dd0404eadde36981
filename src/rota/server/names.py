"""A call has a name, the client's own or one made for it, and its answer carries that, also one that refuses."""

from __future__ import annotations

import re
import uuid

from fastapi import Request as HttpRequest

from rota.core.errors import RequestError

HEADER = "X-Request-Id"
# What a URL and a log line can hold as it is.
_NAME = re.compile(r"[A-Za-z0-9_.:@=+-]{1,128}")


def name_in(http: HttpRequest) -> str:
    """The name a client gives its call in a header, or a new one; raises RequestError for what is no name."""
    given = http.headers.get(HEADER)
    return keep_name(http, uuid.uuid4().hex if given is None else checked_name(HEADER, given))


def keep_name(http: HttpRequest, name: str) -> str:
    """The call goes by this name from now on."""
    http.state.call_name = name
    return name


def kept_name(http: HttpRequest) -> str:
    """What a refusal is to carry: a call may be refused before anybody asked for its name."""
    if name := getattr(http.state, "call_name", None):
        return str(name)
    given = http.headers.get(HEADER, "")
    return given if _NAME.fullmatch(given) else uuid.uuid4().hex


def checked_name(param: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        message = f"{param} must be 1 to 128 letters, digits or any of _ . : @ = + -, not {name[:200]!r}."
        raise RequestError.bad_field(param, message)
    return name
