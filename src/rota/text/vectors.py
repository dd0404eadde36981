"""A text's vector has length one, and the cosine of two vectors says how near their texts are."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from rota.core.errors import RequestError

Vector = Sequence[float]
Pairs = tuple[tuple[int, int], ...]


def normalised(vector: Vector) -> list[float]:
    """The vector with length one. A vector of zeros stays one."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)


def cosine(one: Vector, other: Vector) -> float:
    """Of two vectors of length one."""
    return math.fsum(map(operator.mul, one, other))


def scores(vectors: Sequence[Vector], pairs: Pairs) -> list[float]:
    return [cosine(vectors[one], vectors[other]) for one, other in pairs]


def pairs_of(first: int, second: int) -> Pairs:
    """Positions in a list of all texts: `first` texts of text_1, then `second` of text_2. One goes with each other."""
    if first not in (1, second):
        message = f"text_1 holds {first} texts and text_2 {second}; send one, or as many as in text_2."
        raise RequestError.bad_field("text_1", message)
    return tuple((min(index, first - 1), first + index) for index in range(second))
