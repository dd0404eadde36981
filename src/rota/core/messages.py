"""Messages tell the scheduler what happened."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Somebody asks."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Somebody no longer wants an answer. Unknown ids are ignored: the answer may have crossed it."""

    request_id: RequestId
    at: float
    is_complete: bool = False  # it has all it needs, as at a stop string, and counts as stopped


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Nobody wants an answer any more: the service is stopping."""

    at: float


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Somebody wants an adapter to be known; it is read and checked before anyone may ask for it."""

    adapter: Adapter
    at: float


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    """Somebody wants an adapter gone: after its users have finished, or at once when forced."""

    adapter_id: AdapterId
    at: float
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class AdapterFetched:
    """An adapter was read, checked and lies in host memory."""

    adapter_id: AdapterId
    at: float


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """An adapter's copy into its slot is complete."""

    adapter_id: AdapterId
    at: float


@dataclass(frozen=True, slots=True)
class AdapterFailed:
    """An adapter could not be read or copied."""

    adapter_id: AdapterId
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Explain:
    """Somebody wants to know why a request waits; `Explained` answers, also for a request nobody knows."""

    request_id: RequestId
    at: float


@dataclass(frozen=True, slots=True)
class Inspect:
    """Somebody wants to know how things stand; `Inspected` answers."""

    at: float


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Somebody wants the KV of earlier prompts forgotten; `CacheFlushed` answers."""

    at: float


Query = Explain | Inspect | FlushCache
AdapterMessage = AddAdapter | RemoveAdapter | AdapterFetched | AdapterReady | AdapterFailed
Message = Submit | Abort | AbortAll | AdapterMessage | Query
