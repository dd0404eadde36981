"""The due queue keeps adapters that have work and no slot in the order in which they are due."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from rota.core.ids import AdapterId
from rota.scheduler.group import Group

Place = tuple[float, AdapterId, Group]  # no two places share the first two, so groups are never compared


class DueQueue:
    """Always sorted, so that the next few adapters are found without a look at all of them."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._due_at: dict[AdapterId, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._due_at

    def __iter__(self) -> Iterator[Group]:
        """First due first, as the queue is now: a group that comes or goes meanwhile changes nothing."""
        for _, _, group in self._places.copy():
            yield group

    def get(self, adapter_id: AdapterId) -> Group | None:
        due_at = self._due_at.get(adapter_id)
        return None if due_at is None else self._places[bisect_left(self._places, (due_at, adapter_id))][2]

    def rank(self, adapter_id: AdapterId) -> int:
        """How many groups come before one of them."""
        return bisect_left(self._places, (self._due_at[adapter_id], adapter_id))

    def later_than(self, due_at: float, adapter_id: AdapterId) -> Iterator[Group]:
        """The groups behind this place in the queue."""
        for _, _, group in self._places[bisect_left(self._places, (due_at, adapter_id + 1)) :]:
            yield group

    def last(self, most: int) -> list[Group]:
        """The groups that are due last, the very last first."""
        return [group for _, _, group in self._places[: -most - 1 : -1]]

    def place(self, group: Group, due_at: float) -> None:
        """Put a group into the queue, or move it to where it belongs now."""
        if self._due_at.get(group.adapter_id) == due_at:
            return
        self.remove(group)
        self._due_at[group.adapter_id] = due_at
        insort(self._places, (due_at, group.adapter_id, group))

    def remove(self, group: Group) -> None:
        due_at = self._due_at.pop(group.adapter_id, None)
        if due_at is not None:
            del self._places[bisect_left(self._places, (due_at, group.adapter_id))]
