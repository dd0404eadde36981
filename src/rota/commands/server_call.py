"""A command calls a running server over HTTP, and gets its answer or the sentence of its error."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any, ClassVar

from rota.core.errors import RotaError
from rota.core.options import as_url

DEFAULT_URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "ROTA_API_KEY"
KEY_HELP = f"Sent as 'Authorization: Bearer KEY'; left out: the environment's {KEY_VARIABLE}."
# A server that is alive answers a question about itself at once.
LOOK_S = 10.0
LONGEST_SENTENCE = 500
_SENTENCES = ("error", "error_message", "message", "detail")


class CallError(RotaError):
    """A server cannot be asked, or refuses to answer."""

    exit_code: ClassVar[int] = 1


def with_key(chosen: dict[str, Any]) -> dict[str, Any]:
    """The same options; a key that is left out is the environment's."""
    return {"api_key": os.environ.get(KEY_VARIABLE), **chosen}


@contextmanager
def call(
    url: str,
    api_key: str | None,
    path: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = LOOK_S,
    method: str | None = None,
) -> Iterator[HTTPResponse]:
    """Without a method, a call with a body is a POST. Raises CallError, also while the answer is read."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        # Other clients of OpenAI's routes are given the address with /v1.
        root = as_url(url).rstrip("/").removesuffix("/v1")
        request = urllib.request.Request(root + path, data, headers, method=method)
        with _opener(request.host or "").open(request, timeout=timeout_s) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise CallError(sentence_of(error.read()) or f"The server answers with status {error.code}.") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise CallError(f"The server at {url} cannot be reached, or has gone: {reason}.") from None


def ask(
    url: str,
    api_key: str | None,
    path: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = LOOK_S,
    method: str | None = None,
) -> dict[str, Any]:
    """The JSON that a server of Rota's answers a `call` with. Raises CallError."""
    with call(url, api_key, path, body, timeout_s, method) as response:
        answer = response.read()
    try:
        return dict(json.loads(answer))
    except (ValueError, TypeError):
        raise CallError(f"What answers at {url} is no Rota server.") from None


def sentence_of(body: bytes) -> str:
    """The sentence in an error's body: OpenAI's shape, or any other with a message."""
    try:
        found: Any = json.loads(body)
    except ValueError:
        return ""
    while isinstance(found, dict):
        found = next((found[name] for name in _SENTENCES if found.get(name)), "")
    return str(found or "")[:LONGEST_SENTENCE]


def _opener(host: str) -> urllib.request.OpenerDirector:
    """A server on this machine is not asked through a proxy."""
    is_near = host.partition(":")[0] in ("127.0.0.1", "localhost", "[")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_near else []))
