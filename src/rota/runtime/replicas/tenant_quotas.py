"""Quotas keep the limits of a tenant over all replicas together: what may not run yet waits here.

Each replica's scheduler keeps the same limits for itself, which is not enough: on eight replicas a tenant could have
eight times as much. A request that is sent to a replica counts as running there, also while it waits for a slot or a
row: only so is the sum never above the limit, whatever the replicas decide at the same moment.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from rota.core.errors import Fault
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request
from rota.core.tenant import Tenant
from rota.scheduler.accounts import PRIORITY_HEAD_START_S
from rota.scheduler.admission import queue_fault

Place = tuple[float, int, Request]


@dataclass(slots=True)
class _OpenRequests:
    """One tenant's open requests."""

    tenant: Tenant  # as of its last request: the limits of a key may change
    sent: dict[RequestId, int] = field(default_factory=dict)  # and the replica
    at: Counter[int] = field(default_factory=Counter)  # how many are sent to each replica
    seated: set[RequestId] = field(default_factory=set)  # of those, the ones that hold KV
    held: dict[RequestId, Request] = field(default_factory=dict)
    line: list[Place] = field(default_factory=list)  # a heap; it may have places of requests that are gone

    @property
    def waiting(self) -> int:
        return len(self.held) + len(self.sent) - len(self.seated)

    @property
    def is_full(self) -> bool:
        most = self.tenant.max_running
        return most is not None and len(self.sent) >= most


class TenantQuotas:
    """Callers hold a lock. Only requests of tenants with a name are counted: the others have no limits."""

    def __init__(self) -> None:
        self._accounts: dict[str, _OpenRequests] = {}
        self._of: dict[RequestId, _OpenRequests] = {}
        self._numbers = count()

    @property
    def held(self) -> Iterator[Request]:
        """Every request that waits here."""
        return (request for account in self._accounts.values() for request in account.held.values())

    def fault_of(self, request: Request) -> Fault | None:
        """Why a tenant may not have one more waiting request."""
        most = request.tenant.max_queued
        account = self._accounts.get(request.tenant.name)
        return queue_fault(request.tenant) if account and most is not None and account.waiting >= most else None

    def hold(self, request: Request) -> bool:
        """Let a request wait here if its tenant runs as much as it may; False if the request may be sent."""
        account = self._accounts.get(request.tenant.name)
        if account is None:
            return False
        account.tenant = request.tenant
        if not account.is_full:
            return False
        account.held[request.request_id] = request
        # The order within a tenant is the scheduler's: by arrival, and a priority is a head start.
        due_at = request.arrived_at - request.priority * PRIORITY_HEAD_START_S
        heapq.heappush(account.line, (due_at, next(self._numbers), request))
        self._of[request.request_id] = account
        return True

    def send(self, request: Request, replica: int) -> None:
        """A request is at a replica now."""
        if not request.tenant.name:
            return
        account = self._accounts.setdefault(request.tenant.name, _OpenRequests(request.tenant))
        account.sent[request.request_id] = replica
        account.at[replica] += 1
        self._of[request.request_id] = account

    def seat(self, request_id: RequestId, is_seated: bool) -> None:
        """A request was admitted, or preempted."""
        if account := self._of.get(request_id):
            (account.seated.add if is_seated else account.seated.discard)(request_id)

    def end(self, request_id: RequestId) -> list[Request]:
        """A request has ended, or never began. Gives the requests of its tenant that may be sent now."""
        account = self._of.pop(request_id, None)
        if account is None:
            return []
        account.held.pop(request_id, None)
        account.seated.discard(request_id)
        if (replica := account.sent.pop(request_id, None)) is not None:
            account.at[replica] -= 1
        if not account.held and not account.sent:
            del self._accounts[account.tenant.name]
        return self._due(account)

    def find(self, request_id: RequestId) -> Request | None:
        """A request that waits here."""
        account = self._of.get(request_id)
        return account.held.get(request_id) if account else None

    def position(self, request: Request) -> int:
        """How many requests of the same tenant and adapter wait before it."""
        held = self._of[request.request_id].held.values()
        return sum(one.adapter_id == request.adapter_id and one.arrived_at < request.arrived_at for one in held)

    def holds_adapter(self, adapter_id: AdapterId) -> bool:
        return any(request.adapter_id == adapter_id for request in self.held)

    def others_of(self, request_id: RequestId, replica: int) -> tuple[str, Iterable[int]]:
        """The request's tenant, and the other replicas where the tenant has open requests beside other tenants."""
        account = self._of.get(request_id)
        if account is None or len(self._accounts) == 1:
            return "", ()
        return account.tenant.name, [other for other, number in account.at.items() if number and other != replica]

    def _due(self, account: _OpenRequests) -> list[Request]:
        room = len(account.held)
        if account.tenant.max_running is not None:
            room = min(room, account.tenant.max_running - len(account.sent))
        due: list[Request] = []
        while len(due) < room:
            request = heapq.heappop(account.line)[2]
            if account.held.pop(request.request_id, None):
                due.append(request)
        return due
