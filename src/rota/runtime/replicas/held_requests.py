"""A request that a quota holds back is answered for here, as a scheduler answers for its waiting requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from rota.core.errors import Fault
from rota.core.events import AdapterStanding, Explained, Finished, FinishReason, Inspected, Whereabouts
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request
from rota.runtime.replicas.tenant_quotas import TenantQuotas
from rota.scheduler.sequence import Reason


def end_of(request: Request, reason: FinishReason, at: float, fault: Fault | None = None) -> Finished:
    """The end of a request that no replica has."""
    return Finished(request_id=request.request_id, at=at, reason=reason, prompt_tokens=len(request.prompt), fault=fault)


def explain_held(quotas: TenantQuotas, request_id: RequestId, at: float) -> Explained:
    """Why a request waits; of a request that is not held, that it is not known."""
    request = quotas.find(request_id)
    if request is None:
        return Explained(request_id=request_id, at=at, state=Whereabouts.UNKNOWN)
    return Explained(
        request_id=request_id,
        at=at,
        state=Whereabouts.WAITING,
        reason=Reason.TENANT_FULL.value,
        since=request.arrived_at,
        position=quotas.position(request),
    )


def with_held(inspected: Inspected, held: Iterable[Request]) -> Inspected:
    """One replica's answer with the requests that wait for any replica, so that they are counted once."""
    by_adapter: defaultdict[AdapterId, list[Request]] = defaultdict(list)
    for request in held:
        by_adapter[request.adapter_id].append(request)
    if not by_adapter:
        return inspected
    standings = [_with(one, by_adapter.pop(one.adapter_id, [])) for one in inspected.adapters]
    standings += [_with(_nobody(adapter_id), requests) for adapter_id, requests in by_adapter.items()]
    return replace(inspected, adapters=tuple(standings))


def _with(standing: AdapterStanding, held: list[Request]) -> AdapterStanding:
    if not held:
        return standing
    first_at = min(request.arrived_at for request in held)
    if standing.oldest_at is not None and standing.oldest_at <= first_at:
        return replace(standing, waiting=standing.waiting + len(held))
    return replace(standing, waiting=standing.waiting + len(held), oldest_at=first_at, reason=Reason.TENANT_FULL.value)


def _nobody(adapter_id: AdapterId) -> AdapterStanding:
    return AdapterStanding(adapter_id=adapter_id, waiting=0, running=0, parked=0, oldest_at=None, reason="")
