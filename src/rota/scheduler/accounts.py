"""Accounts say how much of the device each tenant holds, and how much it has got so far."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from rota.core.ids import AdapterId
from rota.core.tenant import Tenant
from rota.policy.fairness import joins_at, share, units
from rota.scheduler.lazy_heap import LazyHeap

# One step of priority counts as this many seconds: of earlier arrival for a request among those of its tenant, and of
# service that a tenant has not got among tenants.
PRIORITY_HEAD_START_S = 10.0
# The estimate of what a unit of service takes covers about this many steps.
REMEMBERED_STEPS = 16
# Such as a token of a prompt takes on a fast GPU; the first steps correct it.
FIRST_UNIT_S = 2e-5


class Account:
    """One tenant's counts, kept up to date; the fairness policy reads them through `policy.fairness.TenantView`."""

    __slots__ = (
        "adapters",
        "blocks",
        "head_start_s",
        "max_queued",
        "max_running",
        "name",
        "open",
        "rows",
        "seats",
        "service_s",
        "weight",
    )

    def __init__(self, tenant: Tenant) -> None:
        self.name = tenant.name
        self.service_s = 0.0
        self.open = 0  # requests that wait or run
        self.rows = 0
        self.seats = 0  # sequences that hold KV: those that run, and those that are parked
        # Adapters that its open requests ask for, in the order of the first request; without the base model.
        self.adapters: dict[AdapterId, None] = {}
        self.blocks = 0  # a block that several sequences share counts for each
        self.renew(tenant)

    def renew(self, tenant: Tenant) -> None:
        """Take over what may have changed since the last request."""
        self.weight = tenant.weight
        self.head_start_s = tenant.priority * PRIORITY_HEAD_START_S
        self.max_running = tenant.max_running
        self.max_queued = tenant.max_queued

    @property
    def waiting(self) -> int:
        return self.open - self.seats

    @property
    def rank(self) -> float:
        """The tenant with the lowest rank goes first."""
        return self.service_s - self.head_start_s

    @property
    def is_full(self) -> bool:
        """Do as many of its sequences hold KV as may?"""
        return self.max_running is not None and self.seats >= self.max_running


class Accounts:
    """The accounts of all tenants that have open requests, or had them while others had."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self.active: dict[str, Account] = {}  # those with open requests
        self.weights = 0.0  # of the active ones
        # The active ones by rank, and by name. A place is corrected only when it comes to the top.
        self._line: LazyHeap[Account] = LazyHeap()
        self._round: OrderedDict[str, None] = OrderedDict()  # the active ones, each in its turn
        self._unit_s = FIRST_UNIT_S

    @property
    def are_shared(self) -> bool:
        """Have several tenants open requests?"""
        return len(self.active) > 1

    def get(self, tenant: Tenant) -> Account | None:
        return self._accounts.get(tenant.name)

    def open(self, tenant: Tenant) -> Account:
        """A tenant has one open request more."""
        account = self._accounts.get(tenant.name) or Account(tenant)
        weight = account.weight if account.open else None
        if not account.open:
            account.service_s = joins_at(account.service_s, (one.service_s for one in self.active.values()))
            self._accounts[account.name] = self.active[account.name] = account
            self._round[account.name] = None
        account.renew(tenant)
        account.open += 1
        if account not in self._line or self._line.order_of(account) > (account.rank, account.name):
            self._place(account)
        if account.weight != weight:
            self._weigh()
        return account

    def close(self, account: Account) -> None:
        """A tenant has one open request less."""
        account.open -= 1
        if account.open:
            return
        del self.active[account.name], self._round[account.name]
        self._line.remove(account)
        self._weigh()
        # What a tenant has got ahead of others counts when it comes back, but only while there are others.
        least_s = min((one.service_s for one in self.active.values()), default=account.service_s)
        self._accounts = {name: one for name, one in self._accounts.items() if one.open or one.service_s > least_s}

    def in_turn(self, most: int) -> list[Account]:
        """Some of the active ones: those of the lowest rank, first by rank, and as many others in their turn."""
        found: list[Account] = []
        while len(found) < most and (place := self._line.top()):
            order, _, account = place
            if (account.rank, account.name) > order:
                self._place(account)
            else:
                found.append(account)
                self._line.remove(account)
        for account in found:
            self._place(account)
        for name in list(islice(self._round, most)):
            self._round.move_to_end(name)
            if self.active[name] not in found:
                found.append(self.active[name])
        return found

    def _place(self, account: Account) -> None:
        self._line.put(account, (account.rank, account.name))

    def charge(self, account: Account, prompt_tokens: int, decodes: int) -> None:
        """A step is planned with these tokens of a tenant. What they take is estimated from earlier steps."""
        account.service_s += units(prompt_tokens, decodes) * self._unit_s / account.weight

    def charge_elsewhere(self, name: str, prompt_tokens: int, decodes: int) -> None:
        """Another engine has served a tenant. That counts while the tenant has open requests here too."""
        if account := self.active.get(name):
            self.charge(account, prompt_tokens, decodes)

    def note_step(self, prompt_tokens: int, decodes: int, step_s: float) -> None:
        """A step with these tokens of all tenants took this long."""
        measured = units(prompt_tokens, decodes)
        if measured:
            self._unit_s += (step_s / measured - self._unit_s) / REMEMBERED_STEPS

    def share(self, account: Account, total: int) -> float:
        return share(account, self.weights, total)

    def _weigh(self) -> None:
        # Summed anew: after many additions and subtractions a running sum would be off.
        self.weights = sum(account.weight for account in self.active.values())
