"""The roster has every replica by number, and says which of them take requests and which are away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_

from rota.core.errors import RequestError
from rota.core.messages import Message
from rota.runtime.replicas.states import joint_state
from rota.runtime.service import Phase, Service, ServiceState

LIVING = (Phase.READY, Phase.STARTING)


@dataclass(frozen=True, slots=True)
class Look:
    """All states at one moment, and what follows from them."""

    states: tuple[ServiceState, ...]
    joint: ServiceState

    @property
    def ready(self) -> list[int]:
        return [number for number, state in enumerate(self.states) if state.phase is Phase.READY]

    @property
    def starting(self) -> list[int]:
        """Those that will probably serve soon."""
        starting = ((number, state) for number, state in enumerate(self.states) if state.phase is Phase.STARTING)
        return [number for number, state in starting if not state.may_last]


class Roster:
    """Callers hold a lock, except for `look`. Replicas stay in it for ever, also those that are down.

    A look at hundreds of replicas takes longer than to route a request. So there is one for each message, and what
    follows from it is worked out only if a state has changed.
    """

    def __init__(self, replicas: Sequence[Service]) -> None:
        self._replicas = [*replicas]
        self.first = len(replicas)  # those with a higher number joined later
        self._has_served = False
        # Those that take requests, as of the last look. While none serves, requests wait for those that start.
        self.takers: frozenset[int] = frozenset()
        self.lowest = 0  # the number of the first that serves
        self._keep(self.states)

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, number: int) -> Service:
        return self._replicas[number]

    @property
    def states(self) -> tuple[ServiceState, ...]:
        return tuple([replica.state for replica in self._replicas])

    def look(self) -> ServiceState:
        """Look at all replicas; gives their joint state."""
        states = self.states
        seen = self._look.states
        if len(states) != len(seen) or not all(map(is_, states, seen)):  # a state is made anew when it changes
            self._keep(states)
        return self._look.joint

    def add(self, replica: Service) -> int:
        self._replicas.append(replica)
        return len(self._replicas) - 1

    def is_late(self, number: int) -> bool:
        """It joined later, and has not been ready yet."""
        return number >= self.first and not self._replicas[number].state.has_served

    def numbers(self, phases: Iterable[Phase] = LIVING) -> list[int]:
        return [number for number, replica in enumerate(self._replicas) if replica.state.phase in phases]

    def starting(self) -> list[int]:
        """Those that will probably serve soon, as of the last look."""
        return self._look.starting

    def away(self) -> frozenset[int]:
        """Those that start and that no adapter waits for: late ones, ones without a place once others served, and ones
        that start again while others serve.

        Before any replica was ready, the adapters of the start wait for it, however long it lasts.
        """
        states = self.states
        has_served, is_served = any(one.has_served for one in states), bool(self.numbers((Phase.READY,)))
        return frozenset(
            number
            for number, state in enumerate(states)
            if state.phase is Phase.STARTING
            and (self.is_late(number) or (state.may_last and has_served) or (state.has_served and is_served))
        )

    def why_none(self) -> str:
        """Why no replica takes requests."""
        waits = (state.reason for state in self.states if state.may_last)
        return next(waits, "All replicas are down.")

    def _keep(self, states: tuple[ServiceState, ...]) -> None:
        self._look = look = Look(states, joint_state(states, self.first, self._has_served))
        self._has_served = self._has_served or look.joint.has_served
        self.takers = frozenset(look.ready or look.starting)
        self.lowest = next(iter(look.ready), 0)

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
