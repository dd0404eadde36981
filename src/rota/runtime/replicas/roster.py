"""The roster has every replica by number, and says which of them take requests and which are away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import is_

from rota.core.capacity import Capacity
from rota.core.errors import RequestError
from rota.core.ids import EngineId
from rota.core.messages import Message
from rota.runtime.service import Service, ServicePhase, ServiceState

# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The state of several replicas together says whether their service serves, and how each of them stands.

_VERBS = {phase: f"is {phase.value}" for phase in ServicePhase} | {ServicePhase.STARTING: "waits"}


def joint_state(states: Sequence[ServiceState], first: int | None = None, has_served: bool = False) -> ServiceState:
    """A service starts with all its first replicas or not at all. After that it is ready while any replica is.

    A replica that cannot start shows a mistake in the flags or in the model, and an operator should hear of that at
    once. A replica that dies later must not take the others out of service, and one that joins later or has no place to
    run must not keep them out of it. `first` says how many replicas there were at the start, None: all of them;
    `has_served` that the service was ready before.
    """
    engines = tuple([replace(state, engine_id=EngineId(number)) for number, state in enumerate(states)])
    reason = _reason(engines)
    if not has_served and not _have_started(engines[:first]):
        is_down = any(one.phase is ServicePhase.DOWN for one in engines[:first])
        phase = ServicePhase.DOWN if is_down else ServicePhase.STARTING
        may_last = not is_down and _may_last(engines)
        return ServiceState(phase=phase, reason=reason, may_last=may_last, replicas=engines)
    ready = [one.capacity for one in engines if one.phase is ServicePhase.READY and one.capacity]
    return ServiceState(
        phase=_phase(engines),
        capacity=_smallest(ready),
        reason=reason,
        may_last=not ready and _may_last(engines),
        has_served=True,
        replicas=engines,
    )


def _have_started(engines: Sequence[ServiceState]) -> bool:
    """All of them, apart from those without a place."""
    started = [one.has_served or one.phase is ServicePhase.READY for one in engines if not one.may_last]
    return bool(started) and all(started)


def _may_last(engines: Sequence[ServiceState]) -> bool:
    """Those that start all have no place to run."""
    starting = [one.may_last for one in engines if one.phase is ServicePhase.STARTING]
    return bool(starting) and all(starting)


def _phase(engines: Sequence[ServiceState]) -> ServicePhase:
    phases = [one.phase for one in engines]
    return next(phase for phase in (ServicePhase.READY, ServicePhase.STARTING, *phases) if phase in phases)


def _smallest(found: Sequence[Capacity]) -> Capacity | None:
    """A request that fits into the smallest replica fits into every one."""
    return min(found, key=lambda one: (one.max_sequence_tokens, one.blocks, one.slots), default=None)


def _reason(engines: Sequence[ServiceState]) -> str:
    """Why replicas are down or wait. They all have the same reason when the service was stopped."""
    reasons = {one.reason: one for one in reversed(engines) if one.reason}
    if len({one.reason for one in engines}) == 1:
        return engines[0].reason
    return " ".join(f"Replica {one.engine_id} {_VERBS[one.phase]}: {one.reason}" for one in reversed(reasons.values()))


LIVING = (ServicePhase.READY, ServicePhase.STARTING)


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
        self._seen: tuple[ServiceState, ...] = ()
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
        states, seen = self.states, self._seen
        if len(states) != len(seen) or not all(map(is_, states, seen)):  # a state is made anew when it changes
            self._keep(states)
        return self._joint

    def add(self, replica: Service) -> int:
        self._replicas.append(replica)
        return len(self._replicas) - 1

    def is_late(self, number: int) -> bool:
        """It joined later, and has not been ready yet."""
        return number >= self.first and not self._replicas[number].state.has_served

    def numbers(self, phases: Iterable[ServicePhase] = LIVING) -> list[int]:
        return [number for number, replica in enumerate(self._replicas) if replica.state.phase in phases]

    def starting(self) -> list[int]:
        """Those that will probably serve soon, as of the last look."""
        seen = enumerate(self._seen)
        return [number for number, one in seen if one.phase is ServicePhase.STARTING and not one.may_last]

    def away(self) -> frozenset[int]:
        """Those that start and that no adapter waits for: late ones, ones without a place once others served, and ones
        that start again while others serve.

        Before any replica was ready, the adapters of the start wait for it, however long it lasts.
        """
        states = self.states
        has_served, is_served = any(one.has_served for one in states), bool(self.numbers((ServicePhase.READY,)))
        return frozenset(
            number
            for number, state in enumerate(states)
            if state.phase is ServicePhase.STARTING
            and (self.is_late(number) or (state.may_last and has_served) or (state.has_served and is_served))
        )

    def why_none(self) -> str:
        """Why no replica takes requests."""
        waits = (state.reason for state in self.states if state.may_last)
        return next(waits, "All replicas are down.")

    def _keep(self, states: tuple[ServiceState, ...]) -> None:
        self._seen, self._joint = states, joint_state(states, self.first, self._has_served)
        self._has_served = self._has_served or self._joint.has_served
        ready = [number for number, one in enumerate(states) if one.phase is ServicePhase.READY]
        self.takers = frozenset(ready or self.starting())
        self.lowest = next(iter(ready), 0)

    def tell(self, number: int, message: Message) -> bool:
        """False if the replica is down."""
        try:
            self._replicas[number].send(message)
        except RequestError:
            return False
        return True

    def tell_all(self, phases: Iterable[ServicePhase], message: Message) -> None:
        for number in self.numbers(phases):
            self.tell(number, message)
