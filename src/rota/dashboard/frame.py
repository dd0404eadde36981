"""A frame is all that the page shows at one moment; `static/replay.js` makes the same shape from a journal.

Instants are seconds of the engine's clock, and so is `now`: the page shows differences only.
"""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.events import DrainState, SlotState, Whereabouts
from rota.core.ids import FIRST_ENGINE, AdapterId, EngineId, Slot
from rota.server.access.limits import LimitUse


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the 99th percentile of a duration, or None without a measurement."""

    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """An adapter in a slot, loading or ready, and why it came. `ended_at` is None while it lasts."""

    slot: Slot
    adapter: AdapterId
    state: SlotState
    reason: str
    begun_at: float
    ended_at: float | None = None
    engine: EngineId = FIRST_ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainShown:
    """One adapter lets its requests end and takes few new ones, so that another adapter gets its slot."""

    victim: AdapterId
    beneficiary: AdapterId
    state: DrainState
    begun_at: float
    ended_at: float | None = None
    engine: EngineId = FIRST_ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFrame:
    """One engine; each of its slots has a lane."""

    id: EngineId
    phase: str
    slots: int
    reason: str = ""  # why it is down, or what it waits for
    is_paused: bool = False  # it computes no step until /resume
    waiting: int = 0
    running: int = 0
    parked: int = 0
    blocks: int = 0  # 0: it does not tell, because it starts or is down
    blocks_used: int = 0
    tokens_per_s: float = 0.0
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRow:
    """One adapter: its requests, why the oldest one waits, and its figures of the window."""

    id: AdapterId
    name: str
    path: str
    is_loaded: bool  # False: it was unloaded, and its last requests still run
    version: int = 1
    is_current: bool = True  # the name means this version
    place: str = ""  # host, reading, disk or source; of what is in a slot, the slot tells more
    rank: int = 0  # 0: it was not read yet
    loads: int = 0  # copies into a slot
    waiting: int = 0
    running: int = 0
    parked: int = 0
    oldest_at: float | None = None
    reason: str = ""
    ttft: Spread = Spread()
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One open request, and why it waits."""

    id: str
    name: str  # as the client calls it
    adapter: AdapterId
    tenant: str
    engine: EngineId
    state: Whereabouts
    asked_at: float
    tokens: int  # so far
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One target of a name whose requests are sent by weight."""

    name: str
    target: str
    weight: float | None  # None: it gets copies, and its answers are dropped
    requests: int  # since the route was set
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """One tenant: its requests, and its figures of the window."""

    name: str
    waiting: int = 0
    running: int = 0
    parked: int = 0
    ttft: Spread = Spread()
    tokens_per_s: float = 0.0
    limits: tuple[LimitUse, ...] = ()
    errors: tuple[tuple[str, int], ...] = ()  # by kind, the most frequent first


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """One kind of error that clients were told: how often, and the last sentence. No sentence quotes a client."""

    kind: str
    total: int
    last_at: float
    sentence: str
    recent: int = 0  # within the window


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """An engine died, and another took its place."""

    at: float
    engine: EngineId
    reason: str


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the charts. A spread is empty where there was nothing to measure."""

    ttft: Spread
    gap: Spread
    step: Spread
    tokens_per_s: float
    waiting: int  # at most, as is the next
    admitted: int  # requests that ran or were parked
    errors_per_min: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """A point every `every_s`, the last at `ended_at`."""

    ended_at: float
    every_s: float
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the page shows now. `tenures`, `charts` and `adapters` hold only what is new since the last frame."""

    now: float
    version: str  # of the server; a page of another version is loaded again
    phase: str
    phase_reason: str
    model: str
    may_load: bool
    engines: tuple[EngineFrame, ...]
    slots: int  # of all engines, as are the figures below
    rows: int
    blocks: int
    blocks_used: int
    waiting: int
    running: int
    parked: int
    tokens_per_s: float  # now, over the last few seconds
    prompt_tokens_per_s: float
    window_s: int  # what the figures from here on are of, and the charts
    mean_tokens_per_s: float
    mean_prompt_tokens_per_s: float
    ttft: Spread
    gap: Spread
    step: Spread
    stall: Spread  # the longest time in an answer that its reader stands without text, of answers that ended
    reader_pace: float  # tokens a second; 0: there is no reader
    residents: tuple[Tenure, ...]
    is_whole: bool  # nothing was sent before: `tenures` holds the whole last minute, and `adapters` all rows
    tenures: tuple[Tenure, ...]
    drains: tuple[DrainShown, ...]
    adapters: tuple[AdapterRow, ...]
    gone: tuple[AdapterId, ...]  # their rows go
    unlisted: int  # adapters that have no row
    requests: tuple[RequestRow, ...]
    unlisted_requests: int
    notices: tuple[str, ...]  # sentences that an operator should read
    targets: tuple[TargetRow, ...]  # empty if all names mean one version
    tenants: tuple[TenantRow, ...]  # empty on a server without keys
    unlisted_tenants: int
    errors: tuple[ErrorRow, ...]
    restarts: tuple[Restart, ...]  # the last ones
    restarts_total: int
    charts: Charts | None
