"""Reasons say why a sequence waits, and what that means for the sequences behind it."""

from __future__ import annotations

from enum import Enum, StrEnum


class Reason(StrEnum):
    """Why a sequence waits."""

    PAUSED = "the server is paused"
    NOT_IN_SLOT = "its adapter is not in a slot"
    IN_FLIGHT = "its last step before preemption is still in flight"
    MAKING_ROOM = "its adapter makes room for another and this request would take too long"
    DELAYED = "prompts are held back for a moment to start together"
    NO_ROW = "as many requests run as may run"
    TENANT_FULL = "as many requests of its key run as may run (max_running)"
    OTHER_TENANT = "another tenant's turn"
    LOOKED_UP = "its prompt is still being looked up among the prompts before it"
    NO_KV = "its prompt does not fit into the KV blocks that are free"
    IN_LINE = "others that came first wait for KV"
    STEP_FULL = "others that came first fill the step"


class Effect(Enum):
    """What the refusal of one sequence means for the others in the same pass."""

    STOP = "no other sequence starts"
    STOP_TENANT = "no other sequence of its tenant starts"
    SKIP_GROUP = "the rest of its adapter's queue lacks the same thing"
    SKIP_TENANT = "the rest of its tenant's requests for its adapter wait behind it"
    SKIP_ONE = "the next of its adapter's queue may still start"


EFFECT_OF = {
    Reason.NO_ROW: Effect.SKIP_GROUP,
    Reason.TENANT_FULL: Effect.STOP_TENANT,
    Reason.IN_LINE: Effect.STOP_TENANT,
    Reason.IN_FLIGHT: Effect.SKIP_TENANT,
    Reason.DELAYED: Effect.SKIP_GROUP,
    Reason.LOOKED_UP: Effect.SKIP_ONE,
    Reason.NO_KV: Effect.SKIP_ONE,
    Reason.MAKING_ROOM: Effect.SKIP_ONE,
}

# A pass skips only a few sequences for the same reason; this is the effect of one more.
EFFECT_AFTER_SKIPS = {
    Reason.NO_KV: Effect.STOP_TENANT,
    Reason.LOOKED_UP: Effect.SKIP_GROUP,
    Reason.MAKING_ROOM: Effect.SKIP_GROUP,
}
