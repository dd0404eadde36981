"""Gateway headers say for whom a request is, and how soon its first token is wanted, if the key may set them.

Their names are llm-d's. A gateway hands on what its clients sent, so the headers of another key mean nothing.
"""

from __future__ import annotations

import math

from fastapi import Request as HttpRequest

from rota.core.errors import RequestError
from rota.server.access.keys import Key
from rota.server.names import checked_name

FAIRNESS_ID = "x-llm-d-inference-fairness-id"
TTFT_MS = "x-llm-d-slo-ttft-ms"


def tenant_in(http: HttpRequest, key: Key) -> Key:
    """The key, with the tenant that the call names. Raises RequestError for a name that a label cannot hold."""
    given = http.headers.get(FAIRNESS_ID)
    if given is None or not key.may_set_headers:
        return key
    return key.on_behalf_of(checked_name(FAIRNESS_ID, given))


def first_token_in(http: HttpRequest, key: Key) -> float | None:
    """The seconds in which a call wants its first token. Raises RequestError if the header is not a number above 0."""
    given = http.headers.get(TTFT_MS)
    if given is None or not key.may_set_headers:
        return None
    try:
        wanted_ms = float(given)
    except ValueError:
        wanted_ms = math.nan
    if not 0.0 < wanted_ms < math.inf:
        raise RequestError.bad_field(TTFT_MS, f"{TTFT_MS} must be milliseconds above 0, not {given[:200]!r}.")
    return wanted_ms / 1000.0
