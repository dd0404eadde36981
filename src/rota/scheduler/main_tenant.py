"""Counts an adapter's open requests by tenant, and knows the tenant with most of them without a look at all tenants."""

from __future__ import annotations

import heapq

from rota.scheduler.accounts import Account

# Entries that no longer hold are cleared away when they are more than this, and more than those that hold.
MOST_LEFT_BEHIND = 64


class TenantCounts:
    """A heap of counts; an entry is compared with the present count only when it comes to the top."""

    __slots__ = ("_accounts", "_counts", "_heap")  # every adapter has one, used or not

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._accounts: dict[str, Account] = {}
        self._heap: list[tuple[int, str]] = []  # the largest count first, then by name

    def enter(self, account: Account) -> bool:
        """One open request more; True if it is the first of its tenant."""
        name = account.name
        count = self._counts.get(name, 0) + 1
        self._accounts[name] = account
        self._note(name, count)
        return count == 1

    def exit(self, account: Account) -> bool:
        """One open request less; True if it was the last of its tenant."""
        name = account.name
        count = self._counts[name] - 1
        if count:
            self._note(name, count)
            return False
        del self._counts[name], self._accounts[name]
        return True

    @property
    def main(self) -> Account | None:
        """The tenant with most open requests."""
        heap = self._heap
        while heap:
            count, name = heap[0]
            if self._counts.get(name) == -count:
                return self._accounts[name]
            heapq.heappop(heap)
        return None

    def _note(self, name: str, count: int) -> None:
        self._counts[name] = count
        if len(self._heap) > MOST_LEFT_BEHIND + 2 * len(self._counts):
            self._heap = [(-own, one) for one, own in self._counts.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (-count, name))
