"""The vector of a text has length one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.streams import Delta

Vector = Sequence[float]


def normalised(vector: Vector) -> list[float]:
    """The vector with length one. A vector of zeros stays one."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)


def vector_of(delta: Delta) -> list[float]:
    """What a prompt became. Raises RequestError if it was aborted before."""
    vector = delta.ending.embedding if delta.ending else None
    if vector is None:
        raise RequestError(Fault(FaultCode.STOPPING, "The request was aborted before its vector was there."))
    return normalised(vector)
