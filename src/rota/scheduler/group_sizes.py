"""Group sizes count each adapter's sequences that hold KV, and how many of them could be in slots at the same time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class GroupSizes:
    """Sizes only, without names: the largest ones matter, as many as there are slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._sizes: list[int] = []  # ascending, of adapters with such sequences
        self.most = 0  # the sum of the largest ones

    def most_after(self, size: int) -> int:
        """What `most` would be if an adapter of this size had one sequence more."""
        return self.most + self._counts(bisect_right(self._sizes, size) - 1 if size else -1)

    def grow(self, size: int) -> None:
        """An adapter of this size has one sequence more."""
        if not size:
            self._sizes.insert(0, 0)
        # Of equal sizes the last one grows and the first one shrinks, so the order stays.
        place = bisect_right(self._sizes, size) - 1
        self.most += self._counts(place)
        self._sizes[place] += 1

    def shrink(self, size: int) -> None:
        """An adapter of this size has one sequence less."""
        place = bisect_left(self._sizes, size)
        self.most -= self._counts(place)
        self._sizes[place] -= 1
        if not self._sizes[place]:
            del self._sizes[place]

    def _counts(self, place: int) -> bool:
        """Is it one of the largest?"""
        return place >= len(self._sizes) - self._slots

    def check(self, sizes: list[int]) -> None:
        assert self._sizes == sorted(sizes), "an adapter's crowd is not counted right"
        assert self.most == sum(self._sizes[-self._slots :] if self._slots else ())
