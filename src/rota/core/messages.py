"""Messages tell the scheduler what happened. A request is one itself: a client sends it."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A client no longer wants an answer. Unknown ids are ignored: the request may just have ended."""

    request_id: RequestId
    at: float
    is_complete: bool = False  # the client has all it needs, as at a stop string; the request counts as stopped


@dataclass(frozen=True, slots=True)
class AbortAll:
    """No client wants an answer any more: the service is stopping."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AddAdapter:
    """A client adds an adapter. It is read and checked before requests may ask for it, unless it is read later."""

    adapter: Adapter
    at: float
    is_known: bool = False  # it was checked before: an engine that dies while it reads the adapter will read it again
    is_read_later: bool = False  # requests may ask for it at once; it is read for the first of them, or before, idly
    refusal: str = ""  # why it cannot be served, if that is known before it is read: by its headers, or by a full disk
    refusal_code: FaultCode = FaultCode.ADAPTER_FAILED
    # The version that it takes the place of: it is brought into a slot before it counts as added, if one is free.
    former: AdapterId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveAdapter:
    """A client removes an adapter: after its requests have finished, or at once when forced.

    An old version takes new requests as long as others use it: `name@version` may ask for it while it is there.
    """

    adapter_id: AdapterId
    at: float
    is_forced: bool = False
    takes_requests: bool = False
    fault: Fault | None = None  # what its requests end with when forced


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequests:
    """A client wants the requests of one version of an adapter to go on under another, from their next token on."""

    old: AdapterId
    new: AdapterId
    at: float
    keeps_kv: bool = False  # else what is written so far is computed again, by the new version


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFetched:
    """An adapter was read, checked and lies in host memory."""

    adapter_id: AdapterId
    at: float
    pages: int = 0  # that it takes in a slot; 0: every slot holds any adapter
    size_bytes: int = 0  # that it takes in host memory; 0: not known
    matrices: int = 0  # an embedding or a head of its own: so many places it takes besides
    rank: int = 0  # the largest of its factors
    seals: tuple[str, ...] = ()  # by rank, of what was read


@dataclass(frozen=True, slots=True)
class SealAdapter:
    """Another engine has read an adapter first, and found this: here it must be the same."""

    adapter_id: AdapterId
    at: float
    seals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """An adapter's copy into its slot is complete. Steps may use the slot before: they wait for the copy."""

    adapter_id: AdapterId
    at: float
    copy_s: float = 0.0  # how long the copy took, without the wait for its slot


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailed:
    """An adapter could not be read or copied."""

    adapter_id: AdapterId
    at: float
    reason: str
    code: FaultCode = FaultCode.ADAPTER_FAILED  # one of PASSING: the next read may succeed


@dataclass(frozen=True, slots=True)
class SlotsGrew:
    """All slots have room for what an adapter brought that came later, such as a DoRA's gains."""

    size_bytes: int  # that they take on the device now
    at: float


@dataclass(frozen=True, slots=True)
class Explain:
    """A client asks why a request waits; `Explained` answers, also for an unknown request."""

    request_id: RequestId
    at: float


@dataclass(frozen=True, slots=True)
class Inspect:
    """A client asks how all adapters and the device stand; `Inspected` answers.

    With `only`, numbers of these adapters are told, and all others in sum, without reasons. That costs the same however
    many adapters have requests; the whole answer takes 37 ms for a thousand.
    """

    at: float
    only: tuple[AdapterId, ...] | None = None


@dataclass(frozen=True, slots=True)
class FlushCache:
    """A client wants the KV of earlier prompts forgotten; `CacheFlushed` answers."""

    at: float


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator stops all answers: no step computes before `Resume`, and what is open stays open.

    `PauseChanged` answers once no step is in flight. With `is_drained`, requests that are open now are answered to
    their end first, and later ones wait.
    """

    at: float
    is_drained: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """Answers go on where they stopped; `PauseChanged` answers."""

    at: float


@dataclass(frozen=True, slots=True)
class ServedElsewhere:
    """A tenant with open requests here got an answer from another engine, which counts as service here too."""

    tenant: str  # its name
    prompt_tokens: int
    decodes: int


Query = Explain | Inspect | FlushCache
AdapterOutcome = AdapterFetched | AdapterReady | AdapterFailed | SlotsGrew
AdapterMessage = AddAdapter | RemoveAdapter | MoveRequests | SealAdapter | AdapterOutcome
Message = Request | Abort | AbortAll | ServedElsewhere | Pause | Resume | AdapterMessage | Query
