"""A journey is an open request: its adapter, its owner, its meters, and its times so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rota.core.events import Finished
from rota.core.ids import AdapterId, EngineId, RequestId
from rota.observe.meters import AdapterMeters, KeyMeters, TargetMeters

# The W3C headers of a client's trace, by name; empty: the client sent none.
TraceHeaders = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Journey:
    adapter_id: AdapterId
    label: str  # the adapter's name, also if its meters are the shared ones
    asked_at: float
    meters: AdapterMeters
    owner: str = ""  # the name of the key that asked
    key_meters: KeyMeters | None = None  # None on a server without keys
    target_meters: TargetMeters | None = None  # None: no traffic route chose its adapter
    call: str = ""  # the client's own name for the call it belongs to
    trace: TraceHeaders = ()
    engine_id: EngineId | None = None  # where it was sent, of several engines
    route: str = ""  # and why, in a word
    admitted_at: float | None = None
    reasons: tuple[str, ...] = ()  # why it waited
    first_at: float | None = None
    last_at: float = 0.0
    read_until: float = 0.0  # when a reader at the usual pace has read the text so far
    stalled_s: float = 0.0  # the longest time that this reader stood without text
    tokens: int = 0
    preemptions: int = 0


# Called at every end, with the request's journey.
OnEnd = Callable[[RequestId, Journey, Finished], None]
