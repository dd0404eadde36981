"""The tenants of open requests: how many of each wait, and how many were admitted, by adapter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rota.core.ids import AdapterId
from rota.dashboard.frame import TenantRow
from rota.dashboard.window import Span

MOST_TENANTS = 40


@dataclass(slots=True)
class Holding:
    """What one tenant has in the engines now."""

    waiting: int = 0
    admitted: Counter[AdapterId] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        return self.waiting + self.admitted.total()


class Tenants:
    """Counts as requests come, are admitted, and go. A tenant without requests takes no memory."""

    def __init__(self) -> None:
        self._holdings: defaultdict[str, Holding] = defaultdict(Holding)

    def wait(self, tenant: str, by: int) -> None:
        self._holdings[tenant].waiting += by
        self._forget(tenant)

    def admit(self, tenant: str, adapter: AdapterId, by: int) -> None:
        admitted = self._holdings[tenant].admitted
        admitted[adapter] += by
        if not admitted[adapter]:
            del admitted[adapter]
        self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        if not self._holdings[tenant].requests:
            del self._holdings[tenant]

    def rows(self, span: Span, is_ready: Callable[[AdapterId], bool]) -> tuple[tuple[TenantRow, ...], int]:
        """A row for each tenant with requests now or tokens in the window, the busiest first, and how many have none.

        `is_ready` says whether an adapter is in a slot: requests of one that is not are parked.
        """
        recent = {one for one in span.sharers if isinstance(one, str)}
        # The sole tenant of a server without keys has no name.
        rows = [self._row(name, span, is_ready) for name in sorted(recent | {*self._holdings}) if name]
        rows.sort(key=lambda row: (-(row.waiting + row.running + row.parked), -row.tokens_per_s, row.name))
        return tuple(sorted(rows[:MOST_TENANTS], key=lambda row: row.name)), len(rows[MOST_TENANTS:])

    def _row(self, name: str, span: Span, is_ready: Callable[[AdapterId], bool]) -> TenantRow:
        holding = self._holdings.get(name, Holding())
        running = sum(count for adapter, count in holding.admitted.items() if is_ready(adapter))
        figures = span.figures_of(name)
        return TenantRow(
            name=name,
            waiting=holding.waiting,
            running=running,
            parked=holding.admitted.total() - running,
            ttft=figures.ttft,
            tokens_per_s=figures.tokens_per_s,
        )
