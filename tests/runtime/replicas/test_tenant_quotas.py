from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rota.core.errors import FaultCode
from rota.core.request import Request
from rota.core.tenant import Tenant
from rota.runtime.replicas.tenant_quotas import TenantQuotas
from tests.builders import request

ACME = Tenant(name="acme", max_running=2, max_queued=3)


def enter(quotas: TenantQuotas, *requests: Request, replica: int = 0) -> list[str]:
    """The requests that may be sent at once."""
    sent = [one for one in requests if not quotas.hold(one) and not quotas.send(one, replica)]
    return [one.request_id for one in sent]


def of_acme(*names: str, **fields) -> list[Request]:
    return [request(name, tenant=ACME, arrived_at=float(index), **fields) for index, name in enumerate(names)]


def test_as_many_requests_of_a_tenant_are_sent_as_may_run_on_all_replicas_together():
    quotas = TenantQuotas()
    a, b, c, d = of_acme("a", "b", "c", "d")

    assert enter(quotas, a, replica=0) + enter(quotas, b, replica=1) + enter(quotas, c, d) == ["a", "b"]
    assert [one.request_id for one in quotas.held] == ["c", "d"]
    assert quotas.end("b") == [c]
    quotas.send(c, 1)
    assert quotas.end("a") == [d]


def test_who_is_held_goes_by_arrival_and_a_priority_is_a_head_start():
    quotas = TenantQuotas()
    first, second, late = of_acme("first", "second", "late")
    urgent = request("urgent", tenant=ACME, arrived_at=9.0, priority=1)
    enter(quotas, *of_acme("x", "y"), first, second, late, urgent)

    assert [quotas.position(one) for one in (first, second, late)] == [0, 1, 2]
    assert quotas.end("x") == [urgent]


def test_a_queue_is_full_when_as_many_are_held_and_wait_at_the_replicas_as_may():
    quotas = TenantQuotas()
    enter(quotas, *of_acme("a", "b", "c"))

    assert quotas.fault_of(request("d", tenant=ACME)).code is FaultCode.QUEUE_FULL
    quotas.seat("a", is_seated=True)
    assert quotas.fault_of(request("d", tenant=ACME)) is None
    quotas.seat("a", is_seated=False)  # it was preempted, and waits again
    assert quotas.fault_of(request("d", tenant=ACME)).code is FaultCode.QUEUE_FULL


def test_a_limit_that_is_lifted_lets_the_next_request_in():
    quotas = TenantQuotas()
    enter(quotas, *of_acme("a", "b", "held"))
    free = request("free", tenant=Tenant(name="acme"))

    assert enter(quotas, free) == ["free"]
    assert [one.request_id for one in quotas.end("free")] == ["held"]


def test_other_tenants_and_those_without_limits_are_not_held():
    quotas = TenantQuotas()
    enter(quotas, *of_acme("a", "b"))

    assert enter(quotas, request("c", tenant="other"), request("d")) == ["c", "d"]


def test_the_service_of_a_tenant_is_told_to_the_other_replicas_where_it_has_requests_beside_others():
    quotas = TenantQuotas()
    enter(quotas, request("a", tenant="one"), replica=0)
    enter(quotas, request("b", tenant="one"), replica=2)
    assert quotas.others_of("a", 0) == ("", ())  # it is alone, so that it takes from nobody

    enter(quotas, request("c", tenant="two"), replica=2)
    assert quotas.others_of("a", 0) == ("one", [2])
    quotas.end("b")
    assert quotas.others_of("a", 0) == ("one", [])


@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_sum_is_never_above_the_limit_and_whoever_is_held_is_sent_in_the_end(most, dice):
    quotas, tenant = TenantQuotas(), Tenant(name="acme", max_running=most)
    coming = [request(str(number), prompt=(5,), tenant=tenant, arrived_at=float(number)) for number in range(12)]
    sent: set[str] = set()
    while coming or sent or [*quotas.held]:
        held = [one.request_id for one in quotas.held]
        if coming and (not sent or dice.random() < 0.5):
            sent.update(enter(quotas, coming.pop(0)))
        else:
            gone = dice.choice([*sorted(sent), *held])
            sent.discard(gone)
            for due in quotas.end(gone):
                quotas.send(due, 0)
                sent.add(due.request_id)
        assert len(sent) == most or (len(sent) < most and not [*quotas.held])
