"""Events tell everybody else what became of a request; they leave by one door and every request ends in one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rota.core.errors import Fault
from rota.core.ids import AdapterId, RequestId, Slot
from rota.core.plan import TokenLogprobs


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request left the queue; `cached_tokens` of its KV were already there."""

    request_id: RequestId
    at: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence gave its KV back and waits to be computed again; nothing it produced is lost."""

    request_id: RequestId
    at: float


@dataclass(frozen=True, slots=True)
class Produced:
    """One step's tokens, all requests together: an event a step, not an event a token."""

    at: float
    request_ids: tuple[RequestId, ...]
    tokens: tuple[int, ...]
    # By position in `tokens`, only for requests that asked.
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's last event."""

    request_id: RequestId
    at: float
    reason: FinishReason
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class AdapterAdded:
    """An adapter was read and checked; requests may ask for it."""

    adapter_id: AdapterId
    at: float


@dataclass(frozen=True, slots=True)
class AdapterRefused:
    """An adapter could not be added."""

    adapter_id: AdapterId
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class AdapterRemoved:
    """An adapter is gone: no user, no slot, no host copy."""

    adapter_id: AdapterId
    at: float


class SlotState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class SlotChanged:
    """A slot's adapter changed, and why."""

    at: float
    slot: Slot
    adapter_id: AdapterId
    state: SlotState
    reason: str = ""


Event = Admitted | Preempted | Produced | Finished | AdapterAdded | AdapterRefused | AdapterRemoved | SlotChanged
