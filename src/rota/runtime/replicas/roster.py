"""The roster has every replica by number, and says which of them take requests and which are away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rota.core.errors import RequestError
from rota.core.messages import Message
from rota.runtime.service import Phase, Service, ServiceState

LIVING = (Phase.READY, Phase.STARTING)


class Roster:
    """Callers hold a lock. Replicas stay in it for ever, also those that are down."""

    def __init__(self, replicas: Sequence[Service]) -> None:
        self._replicas = [*replicas]
        self.first = len(replicas)  # those with a higher number joined later

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, number: int) -> Service:
        return self._replicas[number]

    @property
    def states(self) -> tuple[ServiceState, ...]:
        return tuple([replica.state for replica in self._replicas])

    def add(self, replica: Service) -> int:
        self._replicas.append(replica)
        return len(self._replicas) - 1

    def is_late(self, number: int) -> bool:
        """It joined later, and has not been ready yet."""
        return number >= self.first and not self._replicas[number].state.has_served

    def numbers(self, phases: Iterable[Phase] = LIVING) -> list[int]:
        return [number for number, replica in enumerate(self._replicas) if replica.state.phase in phases]

    def takers(self) -> set[int]:
        """Those that take requests. While none serves, requests wait for those that start, unless that may last."""
        return {*self.numbers((Phase.READY,))} or {*self.starting()}

    def starting(self) -> list[int]:
        """Those that will probably serve soon."""
        return [number for number in self.numbers((Phase.STARTING,)) if not self._replicas[number].state.may_last]

    def away(self) -> frozenset[int]:
        """Those that start and that no adapter waits for: late ones, and ones without a place once others served.

        Before any replica was ready, the adapters of the start wait for it, however long it lasts.
        """
        states = self.states
        has_served = any(state.has_served for state in states)
        return frozenset(
            number
            for number, state in enumerate(states)
            if state.phase is Phase.STARTING and (self.is_late(number) or (state.may_last and has_served))
        )

    def why_none(self) -> str:
        """Why no replica takes requests."""
        waits = (state.reason for state in self.states if state.may_last)
        return next(waits, "All replicas are down.")

    def tell(self, number: int, message: Message) -> bool:
        """False if the replica is down."""
        try:
            self._replicas[number].send(message)
        except RequestError:
            return False
        return True

    def tell_all(self, phases: Iterable[Phase], message: Message) -> None:
        for number in self.numbers(phases):
            self.tell(number, message)
