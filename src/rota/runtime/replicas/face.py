"""What the kernel, the commands and other extensions use of replicas."""

from rota.runtime.replicas.exchange.place import exchange_place, open_exchange
from rota.runtime.replicas.router import Router, Rule
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.replicas.tenant_quotas import TenantQuotas

__all__ = ["ReplicatedService", "Router", "Rule", "TenantQuotas", "exchange_place", "open_exchange"]
