"""The state of several replicas together says whether their service serves, and how each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rota.core.config import Capacity
from rota.core.ids import EngineId
from rota.runtime.service import Phase, ServiceState


def joint_state(states: Sequence[ServiceState]) -> ServiceState:
    """A service starts with all its replicas or not at all. After that it is ready while any of them is.

    A replica that cannot start shows a mistake in the flags or in the model, and an operator should hear of that at
    once. A replica that dies later must not take the others out of service.
    """
    engines = tuple(replace(state, engine_id=EngineId(number)) for number, state in enumerate(states))
    down = [one for one in engines if one.phase is Phase.DOWN]
    if not all(_has_started(one) for one in engines):
        phase = Phase.DOWN if down else Phase.STARTING
        return ServiceState(phase=phase, reason=_reason(down, len(engines)), replicas=engines)
    ready = [one.capacity for one in engines if one.phase is Phase.READY and one.capacity]
    return ServiceState(
        phase=_phase(engines),
        capacity=_smallest(ready),
        reason=_reason(down, len(engines)),
        has_served=True,
        replicas=engines,
    )


def _has_started(state: ServiceState) -> bool:
    return state.has_served or state.phase is Phase.READY


def _phase(engines: Sequence[ServiceState]) -> Phase:
    phases = [one.phase for one in engines]
    return next(phase for phase in (Phase.READY, Phase.STARTING, *phases) if phase in phases)


def _smallest(found: Sequence[Capacity]) -> Capacity | None:
    """A request that fits into the smallest replica fits into every one."""
    return min(found, key=lambda one: (one.max_sequence_tokens, one.blocks, one.slots), default=None)


def _reason(down: Sequence[ServiceState], replicas: int) -> str:
    """Why replicas are down. They all have the same reason when the service was stopped."""
    reasons = {one.reason: one.engine_id for one in reversed(down)}
    if len(down) == replicas and len(reasons) == 1:
        return down[0].reason
    return " ".join(f"Replica {number} is down: {reason}" for reason, number in reversed(reasons.items()))
