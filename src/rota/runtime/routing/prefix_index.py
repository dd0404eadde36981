"""The prefix index remembers which replica has seen the beginning of which prompt, in bounded memory and time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rota.core.request import Request

# Where beginnings end, in tokens: a prompt is known by at most so many of them, and hashed no further than the last.
ENDS = (64, 128, 256, 512, 1024, 2048)
MOST_BEGINNINGS = 16_384


class PrefixIndex:
    """Beginnings by hash; those that were not asked for longest are forgotten first.

    An entry is a number with one bit for each replica. Adapters and cache scopes share no KV, so they share no entry.
    """

    def __init__(self, most: int = MOST_BEGINNINGS) -> None:
        self._most = most
        self._seen: dict[int, int] = {}  # the longest unused first

    def __len__(self) -> int:
        return len(self._seen)

    def keys_of(self, request: Request) -> list[int]:
        """The beginnings of a prompt, the shortest first."""
        prompt, begin = request.prompt, 0
        key = hash((request.adapter_id, request.cache_scope))
        keys: list[int] = []
        for end in ENDS:
            if end > len(prompt):
                break
            key = hash((key, prompt[begin:end]))
            keys.append(key)
            begin = end
        return keys

    def seen(self, keys: list[int], replicas: int) -> NDArray[np.float64] | None:
        """How many tokens of a prompt with these beginnings each of so many replicas has seen; None: none of them."""
        chain: list[int] = []
        for key in keys:
            if not (holders := self._seen.get(key)):
                break
            chain.append(holders)
        if not chain:
            return None
        found, done = np.zeros(replicas), 0
        for end, holders in zip(ENDS[len(chain) - 1 :: -1], reversed(chain), strict=True):
            if left := holders & ~done:  # mostly none: who has seen a beginning has seen all shorter ones
                found[_places(left, replicas)] = end
                done |= left
        return found

    def note(self, keys: list[int], replica: int) -> None:
        """A prompt with these beginnings went to a replica."""
        seen = self._seen
        for key in keys:
            seen[key] = seen.pop(key, 0) | 1 << replica
        while len(seen) > self._most:
            del seen[next(iter(seen))]

    def forget(self, replica: int) -> None:
        """A replica has lost its KV."""
        kept = ~(1 << replica)
        self._seen = {key: left for key, replicas in self._seen.items() if (left := replicas & kept)}


def _places(holders: int, replicas: int) -> NDArray[np.bool_]:
    """The bits of a number, the lowest first."""
    octets = np.frombuffer(holders.to_bytes(-(-replicas // 8), "little"), np.uint8)
    return np.unpackbits(octets, count=replicas, bitorder="little").view(np.bool_)
