"""Fetching orders adapters from disk into host memory, at another adapter's cost if that is full."""

from __future__ import annotations

import math

from rota.scheduler.admission import Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft, WantedAt
from rota.scheduler.group import Group, Standing


class Fetching:
    """Only an adapter whose weights lie in host memory can be copied into a slot."""

    def __init__(self, books: Books, admission: Admission) -> None:
        self._books = books
        self._admission = admission

    def is_at_hand(self, draft: Draft, group: Group) -> bool:
        """Does it lie in host memory? If not, have it fetched."""
        books = self._books
        if group.standing is Standing.NEW or books.hosts.is_fetching(group.adapter_id):
            return False
        if books.hosts.has(group.adapter_id):
            return True
        # Where an adapter that is wanted sooner found no room, none that is wanted later does: it need not look.
        limit = draft.no_room_from
        may_try = limit is None or ((False, books.due_at(group)) < limit and self._wanted_at(group) < limit)
        if may_try and not self.try_fetch(draft, group):
            draft.no_room_from = self._wanted_at(group)
        return False

    def try_fetch(self, draft: Draft, group: Group) -> bool:
        """Order an adapter to be read into host memory, at another's cost if that is full; False if none can go."""
        hosts = self._books.hosts
        assert group.adapter is not None
        if hosts.is_full:
            groups = self._books.groups
            # The client that adds an adapter waits to be told that it can be read.
            wanted_at = (False, -math.inf) if group.standing is Standing.NEW else self._wanted_at(group)
            victim = hosts.cheapest(lambda other: self._cost_of_dropping(draft, groups[other], wanted_at))
            if victim is None:
                return False
            hosts.forget(victim)
            draft.drops.append(victim)
        hosts.begin_fetch(group.adapter_id)
        draft.fetches.append(group.adapter)
        return True

    def _cost_of_dropping(self, draft: Draft, group: Group, wanted_at: WantedAt) -> int | None:
        """Idle adapters first, then those whose weights are in a slot, then those that will be wanted later."""
        tenancy = self._books.slots.tenancies.get(group.adapter_id)
        if tenancy and (not tenancy.is_ready or any(load.adapter_id == group.adapter_id for load in draft.loads)):
            return None  # it is being copied from there
        if not group.users:
            return 0
        if tenancy:
            return 1
        return 2 if self._wanted_at(group) > wanted_at else None

    def _wanted_at(self, group: Group) -> WantedAt:
        """When an adapter without a slot will be copied to one; later than all others if it could not run there."""
        return (not self._admission.can_work(group), self._books.due_at(group))
