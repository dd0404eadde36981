"""The absent adapters have work and no slot; they are kept in every order in which a slot policy looks at them."""

from __future__ import annotations

import math

from rota.scheduler.due_queue import DueQueue
from rota.scheduler.group import Group


class Absent(DueQueue):
    """Itself sorted by when the slot policy says that an adapter is due. The other orders hold some or all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parked = DueQueue()  # adapters that hold KV, in the same order
        self.at_hand = DueQueue()  # adapters whose weights lie in host memory, in the same order
        self.stalest = DueQueue()  # adapters that hold KV, the longest without a step first
        self.newcomers = DueQueue()  # adapters that wait for a first token, first come first
        self.oldest = DueQueue()  # the adapter with the oldest open request first
        self.largest = DueQueue()  # the adapter with most open requests first

    def put(self, group: Group, due_at: float, is_at_hand: bool) -> None:
        """Put a group into every order that it belongs to, or move it to where it belongs now."""
        self.place(group, due_at)
        self.oldest.place(group, group.first_arrival)
        self.largest.place(group, -group.users)
        _place(self.newcomers, group, group.first_token_due_at)
        self.at_hand.place(group, due_at) if is_at_hand else self.at_hand.remove(group)
        _place(self.parked, group, due_at if group.running else math.inf)
        _place(self.stalest, group, group.ran_at if group.running else math.inf)

    def remove(self, group: Group) -> None:
        super().remove(group)
        for order in (self.parked, self.at_hand, self.stalest, self.newcomers, self.oldest, self.largest):
            order.remove(group)


def _place(order: DueQueue, group: Group, at: float) -> None:
    order.place(group, at) if at < math.inf else order.remove(group)
