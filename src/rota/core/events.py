"""Events tell the other rooms what happened; they leave by one door, and every request ends in one event.

An event of one request says which request it is of. Every other event says which engine it is of.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rota.core.errors import Fault, FaultCode
from rota.core.ids import FIRST_ENGINE, AdapterId, EngineId, RequestId, Slot
from rota.core.plan import TokenLogprobs
from rota.core.standstill import StoodStill, WentOn

# ── moved ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A request that was moved has tokens of two versions of its adapter.


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A request goes on under another version of its adapter; the first `output_tokens` tokens are the old version's.

    The KV of these tokens and of the prompt was kept, or is computed again.
    """

    request_id: RequestId
    at: float
    old: AdapterId
    new: AdapterId
    old_version: int
    new_version: int
    output_tokens: int
    kept_kv: bool = False


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request left the queue; the KV of its first `cached_tokens` tokens was already there."""

    request_id: RequestId
    at: float
    cached_tokens: int
    reasons: tuple[str, ...] = ()  # what the request waited for; empty if it was admitted at once


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence gave its KV back and waits to be computed again. No token is lost."""

    request_id: RequestId
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """The tokens of one step, for all its requests: one event per step, not one per token.

    A step that only computed prompts has this event too: it took time, though it gave no token.
    """

    at: float
    request_ids: tuple[RequestId, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # by position in `tokens`, for requests that asked
    step_s: float = 0.0  # how long the device took for the step
    prompt_tokens: int = 0
    engine_id: EngineId = FIRST_ENGINE


@dataclass(frozen=True, slots=True)
class PromptsScored:
    """The log-probabilities of prompt tokens, for requests that asked; comes before the step's tokens.

    The first token of a prompt has no score. The score of every other token is told once, in order.
    """

    at: float
    request_ids: tuple[RequestId, ...]
    scores: tuple[tuple[TokenLogprobs, ...], ...]  # by position in `request_ids`


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request's last event."""

    request_id: RequestId
    at: float
    reason: FinishReason
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    fault: Fault | None = None
    embedding: tuple[float, ...] | None = None  # of a request with pooling; its length is not normalised


@dataclass(frozen=True, slots=True)
class AdapterAdded:
    """An adapter was checked; requests may ask for it. Most adapters were read too, and the others are read later."""

    adapter_id: AdapterId
    at: float
    engine_id: EngineId = FIRST_ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRefused:
    """An adapter could not be added, or not be read later: after the start, or again by a new engine."""

    adapter_id: AdapterId
    at: float
    reason: str
    engine_id: EngineId = FIRST_ENGINE
    others_serve: bool = False  # this engine lost the adapter, and other engines go on with it
    code: FaultCode = FaultCode.ADAPTER_FAILED  # ENGINE_DIED, or PASSING: nothing is known of the adapter


@dataclass(frozen=True, slots=True)
class AdapterRemoved:
    """An adapter is gone: no user, no slot, no host copy."""

    adapter_id: AdapterId
    at: float
    engine_id: EngineId = FIRST_ENGINE


class SlotState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    EMPTY = "empty"


class SlotReason(StrEnum):
    """Why an adapter comes into a slot, or leaves it."""

    SLOT_EMPTY = "a slot was empty"
    RESIDENT_IDLE = "a resident was idle"
    NEW_VERSION = "a new version, before its name means it"
    TURN_COME = "its turn has come"  # it takes the slot of an adapter that still has work
    TURN_OVER = "its turn is over"
    IDLE = "idle"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChanged:
    """A slot's adapter changed, and why. A copy that is complete has no reason of its own."""

    at: float
    slot: Slot
    adapter_id: AdapterId
    state: SlotState
    reason: SlotReason | None = None
    detail: str = ""  # what went wrong, if something did
    engine_id: EngineId = FIRST_ENGINE


class HostState(StrEnum):
    READING = "reading"
    HELD = "held"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChanged:
    """An adapter is being read into host memory, is there, or is there no more."""

    at: float
    adapter_id: AdapterId
    state: HostState
    engine_id: EngineId = FIRST_ENGINE
    size_bytes: int = 0  # that it takes there; 0: not known, or not there
    rank: int = 0  # the largest of its factors; 0: not known
    seals: tuple[str, ...] = ()  # by rank, of what was read


class DrainState(StrEnum):
    STARTED = "started"
    FINISHED = "finished"
    CALLED_OFF = "called_off"
    EXPIRED = "expired"  # the freed slot was kept for the beneficiary, which did not come in time


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainChanged:
    """One adapter drains for another, or no longer does."""

    at: float
    victim: AdapterId
    beneficiary: AdapterId
    state: DrainState
    engine_id: EngineId = FIRST_ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillsReleased:
    """The prefill delayer let prompts start: why, and how long it had held them back."""

    at: float
    reason: str
    passes: int
    waited_s: float
    engine_id: EngineId = FIRST_ENGINE


class Whereabouts(StrEnum):
    """The state of a request."""

    WAITING = "waiting"  # holds nothing yet
    RUNNING = "running"
    PARKED = "parked"  # holds KV; its adapter is not in a slot just now, or other requests have all rows
    UNKNOWN = "unknown"  # the request has ended, or there never was one with this id


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Answers `Explain`: why a request waits, since when, and how many requests of its adapter are before it.

    `outlook` is for a request whose adapter has no slot: how near the adapter is to one.
    """

    request_id: RequestId
    at: float
    state: Whereabouts
    reason: str = ""
    since: float = 0.0
    position: int = 0
    outlook: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStanding:
    """The requests of one adapter, and why the oldest waits; `outlook`: how near an adapter is to a slot."""

    adapter_id: AdapterId
    waiting: int
    running: int
    parked: int
    oldest_at: float | None
    reason: str
    outlook: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """Answers `Inspect`: the base model, every adapter that has requests, and how much of the device is in use."""

    at: float
    steps: int
    rows: int
    blocks: int
    blocks_used: int
    slots: int  # that are open now
    adapters: tuple[AdapterStanding, ...]
    engine_id: EngineId = FIRST_ENGINE
    pages: int = 0  # that the slots share; 0: every slot holds any adapter
    pages_used: int = 0
    slot_bytes: int = 0  # what all slots take on the device
    promisable_s: float = 0.0  # the shortest pause of an answer that could be promised now; 0: none pauses for a turn
    # If only some adapters were asked for, the requests of all others, and the adapters with work and without a slot.
    others: AdapterStanding | None = None
    absent: tuple[AdapterId, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.others is None


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """Answers `FlushCache`: how many blocks of earlier prompts were forgotten."""

    at: float
    blocks: int
    engine_id: EngineId = FIRST_ENGINE


@dataclass(frozen=True, slots=True)
class PauseChanged:
    """Answers `Pause`, when no step is in flight any more, and `Resume`."""

    at: float
    is_paused: bool
    engine_id: EngineId = FIRST_ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRestarted:
    """The engine died and another takes its place: no request runs, no slot is taken, and adapters are read again."""

    at: float
    reason: str
    engine_id: EngineId = FIRST_ENGINE
    died_of: AdapterId | None = None  # the only one that it read, or else served, if it died by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A request was sent to one of several replicas; `reason` is the rule's, in a word."""

    request_id: RequestId
    at: float
    reason: str
    engine_id: EngineId = FIRST_ENGINE


AdapterEvent = AdapterAdded | AdapterRefused | AdapterRemoved | SlotChanged | HostChanged | DrainChanged
QueryResult = Explained | Inspected | CacheFlushed
RequestEvent = Admitted | Preempted | Moved | PromptsScored | Produced | Finished
EngineEvent = EngineRestarted | PauseChanged | StoodStill | WentOn
Event = RequestEvent | Routed | PrefillsReleased | AdapterEvent | EngineEvent | QueryResult
