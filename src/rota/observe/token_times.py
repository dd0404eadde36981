"""Token times collect which requests got a token when, and give each request its times many at once."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from rota.core.events import Produced
from rota.core.ids import RequestId

# So many tokens take a few MB, and a request has most of its tokens among them.
MOST_TOKENS = 1 << 18


class TokenTimes:
    """A Python call for every token would take longer than all else that a simulation does with it."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._number_of: defaultdict[RequestId, int] = defaultdict(count().__next__)  # numbered as they come
        self._owners: array[int] = array("q")  # a number for every token, one step after the other
        self._moments: array[float] = array("d")  # of the steps
        self._counts: array[int] = array("q")  # tokens of the steps

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def is_full(self) -> bool:
        return len(self._owners) >= MOST_TOKENS

    def note(self, event: Produced) -> None:
        self._owners.extend(map(self._number_of.__getitem__, event.request_ids))
        self._moments.append(event.at)
        self._counts.append(len(event.request_ids))

    def take(self) -> Iterator[tuple[RequestId, NDArray[np.float64]]]:
        """Every request that got tokens, with their moments in order; from now on nothing is known of them."""
        owners: NDArray[np.integer] = np.frombuffer(self._owners, dtype=np.int64)
        moments = np.repeat(np.frombuffer(self._moments), np.frombuffer(self._counts, dtype=np.int64))
        request_ids = list(self._number_of)
        self._forget()
        if not len(owners):
            return
        if len(request_ids) <= 1 << 16:
            owners = owners.astype(np.uint16)  # numpy sorts short numbers several times faster
        order = np.argsort(owners, kind="stable")  # of the same request, the earlier token stays the earlier
        owners, moments = owners[order], moments[order]
        starts = np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1])))
        for number, own in zip(owners[starts].tolist(), np.split(moments, starts[1:]), strict=True):
            yield request_ids[number], own
