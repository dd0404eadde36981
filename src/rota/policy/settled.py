"""Settled adapters run until they have no work, or until another adapter's claim is clearly larger.

As many adapters are settled as there are slots. A claim is a sum over an adapter's open requests, waiting or running,
and grows with their age: nearly first come first served, but three old requests count for more than one. A weight
scales the claim; while few adapters are absent, weights share the slots exactly (`policy.shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from rota.core.ids import AdapterId
from rota.policy.shares import Shares
from rota.policy.views import AdapterView, SlotsView

# Two adapters of nearly equal claims must not take each other's place in turn.
LARGER = 1.5
# While KV is short, the sequences of an adapter that leaves would hold blocks that others need to finish.
LARGER_WHILE_KV_IS_SHORT = 3.0
# Of all absent adapters, those with the oldest requests and those with most requests are looked at.
LOOK_AHEAD = 16
# Claims are compared again after so many passes: they grow with age, and a step is short beside that.
LOOK_EVERY = 4

Merits = dict[AdapterId, float]


class Settled:
    """Remembers which adapters are settled, and which come next."""

    def __init__(self) -> None:
        self._most = 0  # as many as there are slots
        self._ids: dict[AdapterId, None] = {}
        self._passes = 0
        self._shares = Shares()
        self.next: list[AdapterId] = []  # of adapters that are not settled, the largest claims first

    def __contains__(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._ids

    def __iter__(self) -> Iterator[AdapterId]:
        return iter(self._ids)

    @property
    def shares(self) -> Shares:
        return self._shares

    def views(self, slots: SlotsView) -> list[AdapterView]:
        return [view for one in self._ids if (view := slots.view_of(one))]

    def forget(self, adapter_id: AdapterId) -> None:
        self._ids.pop(adapter_id, None)

    def observe(self, slots: SlotsView, now: float) -> None:
        working = [view.adapter_id for view in self.views(slots) if view.running or view.waiting]
        if len(working) < len(self._ids):
            self._ids = dict.fromkeys(working)
        self._passes += 1
        self._most = slots.total
        if len(self._ids) != self._most or self._passes % LOOK_EVERY == 0:
            self._look(slots, now)

    def _look(self, slots: SlotsView, now: float) -> None:
        held, others = self.views(slots), self._others(slots)
        both = [*held, *others]
        if self._shares.count(both if len(slots.absent) <= LOOK_AHEAD else []):
            merits = self._shares.merits
            self._settle(held, others, merits, bar=lambda least: merits[least.adapter_id] + self._shares.margin(least))
        else:
            merits = {view.adapter_id: view.claim(now) * view.weight for view in both}
            larger = LARGER_WHILE_KV_IS_SHORT if is_kv_short(slots, held) else LARGER
            self._settle(held, others, merits, bar=lambda least: larger * merits[least.adapter_id])

    def _others(self, slots: SlotsView) -> list[AdapterView]:
        """Residents that are not settled, and the absent adapters whose claims may be the largest."""
        found = {view.adapter_id: view for view in slots.residents if view.running or view.waiting}
        if slots.absent:
            for view in (*islice(slots.oldest, LOOK_AHEAD), *islice(slots.largest, LOOK_AHEAD)):
                if view.adapter_id not in found and (view.running or slots.can_start(view.adapter_id)):
                    found[view.adapter_id] = view
        return [view for view in found.values() if view.adapter_id not in self._ids]

    def _settle(
        self,
        held: list[AdapterView],
        others: list[AdapterView],
        merits: Merits,
        bar: Callable[[AdapterView], float],
    ) -> None:
        """Settle the adapters of the largest merit: first where there is room, then over the bars of settled ones."""

        def rank(view: AdapterView) -> tuple[float, AdapterId]:
            return (-merits[view.adapter_id], view.adapter_id)

        held = sorted(held, key=rank)
        while len(held) > self._most:  # slots have closed
            others.append(held.pop())
            del self._ids[others[-1].adapter_id]
        others.sort(key=rank)
        room = self._most - len(self._ids)
        self._ids |= dict.fromkeys(view.adapter_id for view in others[:room])
        for least, other in zip(reversed(held), others[room:], strict=False):
            if merits[other.adapter_id] <= bar(least):
                break
            del self._ids[least.adapter_id]
            self._ids[other.adapter_id] = None
        self.next = [view.adapter_id for view in others if view.adapter_id not in self._ids]


def is_kv_short(slots: SlotsView, settled: list[AdapterView]) -> bool:
    """Are fewer blocks free than settled adapters hold? Then their sequences might not find room to finish."""
    return slots.free_blocks < sum(view.blocks for view in settled)
