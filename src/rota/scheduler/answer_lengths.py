"""Answer lengths remember how long an adapter's last answers were, sorted, so that a mean of them is found at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

REMEMBERED = 64


class AnswerLengths:
    """Every pass asks for means, and only the end of an answer changes them."""

    # Every adapter has one, used or not: an empty deque alone would take 600 bytes.
    __slots__ = ("_means", "_recent", "_sorted")

    def __init__(self) -> None:
        self._recent: list[int] = []
        self._sorted: list[int] = []
        self._means: list[int] | None = None  # of the lengths from each place on, rounded up; None: to be made anew

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def longest(self) -> int:
        return self._sorted[-1]

    def append(self, length: int) -> None:
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._recent.pop(0))]
        self._means = None

    def mean_above(self, done: int) -> int | None:
        """The mean of the lengths above `done`, rounded up; None if there are none."""
        if self._means is None:
            self._means = self._made_means()
        place = bisect_right(self._sorted, done)
        return self._means[place] if place < len(self._means) else None

    def _made_means(self) -> list[int]:
        means, total = [], 0
        for count, length in enumerate(reversed(self._sorted), start=1):
            total += length
            means.append(-(-total // count))
        means.reverse()
        return means
