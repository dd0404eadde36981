"""An answer may be the vector of a text, with length one."""

from __future__ import annotations

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.streams import Delta
from rota.text.vectors import normalised


def vector_of(delta: Delta) -> list[float]:
    """What a prompt became. Raises RequestError if it was aborted before."""
    vector = delta.ending.embedding if delta.ending else None
    if vector is None:
        raise RequestError(Fault(FaultCode.STOPPING, "The request was aborted before its vector was there."))
    return normalised(vector)
