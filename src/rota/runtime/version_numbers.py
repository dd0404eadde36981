"""Version numbers count what was loaded under each name."""

from __future__ import annotations

# Names that were unloaded and are still remembered, so that a client who loads new names for ever fills no memory.
MOST_AT_REST = 10_000


class VersionNumbers:
    """A number is given once: a name that is unloaded and loaded again goes on counting.

    Only the names that were unloaded longest ago begin again, once there are many of them.
    """

    def __init__(self, most_at_rest: int = MOST_AT_REST) -> None:
        self._last: dict[str, int] = {}
        self._at_rest: dict[str, None] = {}
        self._most_at_rest = most_at_rest

    def next(self, name: str) -> int:
        self._at_rest.pop(name, None)
        number = self._last[name] = self._last.get(name, 0) + 1
        return number

    def rest(self, name: str) -> None:
        """The name is loaded no more."""
        self._at_rest[name] = None
        if len(self._at_rest) > self._most_at_rest:
            oldest = next(iter(self._at_rest))
            del self._at_rest[oldest], self._last[oldest]
