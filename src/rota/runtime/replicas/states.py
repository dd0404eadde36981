"""The state of several replicas together says whether their service serves, and how each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rota.core.capacity import Capacity
from rota.core.ids import EngineId
from rota.runtime.service import Phase, ServiceState

_VERBS = {phase: f"is {phase.value}" for phase in Phase} | {Phase.STARTING: "waits"}


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
        is_down = any(one.phase is Phase.DOWN for one in engines[:first])
        phase = Phase.DOWN if is_down else Phase.STARTING
        may_last = not is_down and _may_last(engines)
        return ServiceState(phase=phase, reason=reason, may_last=may_last, replicas=engines)
    ready = [one.capacity for one in engines if one.phase is Phase.READY and one.capacity]
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
    started = [one.has_served or one.phase is Phase.READY for one in engines if not one.may_last]
    return bool(started) and all(started)


def _may_last(engines: Sequence[ServiceState]) -> bool:
    """Those that start all have no place to run."""
    starting = [one.may_last for one in engines if one.phase is Phase.STARTING]
    return bool(starting) and all(starting)


def _phase(engines: Sequence[ServiceState]) -> Phase:
    phases = [one.phase for one in engines]
    return next(phase for phase in (Phase.READY, Phase.STARTING, *phases) if phase in phases)


def _smallest(found: Sequence[Capacity]) -> Capacity | None:
    """A request that fits into the smallest replica fits into every one."""
    return min(found, key=lambda one: (one.max_sequence_tokens, one.blocks, one.slots), default=None)


def _reason(engines: Sequence[ServiceState]) -> str:
    """Why replicas are down or wait. They all have the same reason when the service was stopped."""
    reasons = {one.reason: one for one in reversed(engines) if one.reason}
    if len({one.reason for one in engines}) == 1:
        return engines[0].reason
    return " ".join(f"Replica {one.engine_id} {_VERBS[one.phase]}: {one.reason}" for one in reversed(reasons.values()))
