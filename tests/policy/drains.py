"""A draining policy with what it has told, and slots to show it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rota.core.events import DrainChanged
from rota.core.ids import AdapterId
from rota.policy.drains import DrainingPolicy
from rota.policy.slot_policy import Turn
from tests.policy.views import Absent, Slots, View, view


@dataclass(slots=True)
class Observed:
    """Remembers what its policy told of, so that a test can count it."""

    policy: DrainingPolicy
    news: list[DrainChanged] = field(default_factory=list)

    def see(
        self,
        absent: list[View],
        residents: list[View],
        now: float,
        free: int = 0,
        being_read: frozenset[AdapterId] = frozenset(),
        open: int = 0,
    ) -> list[Turn]:
        """One pass: `absent` wait for a slot and for nothing else, `residents` have one. Gives the pass's turns."""
        waiting = Absent(sorted(absent, key=lambda one: (self.policy.due_at(one), one.adapter_id)))
        slots = Slots(residents, waiting, free, being_read=being_read, open=open)
        self.policy.observe(slots, now)
        self.news += [news for news in self.policy.take_news() if isinstance(news, DrainChanged)]
        return list(self.policy.turns(slots, now))

    def told(self, state: str) -> int:
        """How often it told of drains that came to this."""
        return sum(news.state == state for news in self.news)


def starving(*adapters: AdapterId, since: float = 0.0) -> list[View]:
    return [view(adapter_id, waiting_since=since) for adapter_id in adapters]


def busy(*adapters: AdapterId, remaining: int = 15) -> list[View]:
    return [view(adapter_id, running=1, remaining=remaining) for adapter_id in adapters]
