"""Vectors of length one, as JSON or as bytes, and the cosine between two."""

from __future__ import annotations

import base64
import math
import operator
import sys
from array import array
from collections.abc import Sequence

import msgspec

Vector = Sequence[float]


def normalised(vector: Vector) -> list[float]:
    """The vector with length one. A vector of zeros stays one."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)


def cosine(one: Vector, other: Vector) -> float:
    """Of two vectors of length one."""
    return math.fsum(map(operator.mul, one, other))


def encoded(vector: Vector) -> msgspec.Raw:
    """As JSON."""
    return msgspec.Raw(msgspec.json.encode(vector))


def as_base64(vector: Vector) -> str:
    """32-bit floats, the lowest byte first."""
    packed = array("f", vector)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()
