from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rota.core.errors import FaultCode
from rota.core.request import Request
from rota.core.tenant import Tenant
from rota.runtime.tenant_gate import TenantGate
from tests.builders import request

ACME = Tenant(name="acme", max_running=2, max_queued=3)


def enter(gate: TenantGate, *requests: Request, replica: int = 0) -> list[str]:
    """The requests that may be sent at once."""
    sent = [one for one in requests if not gate.hold(one) and not gate.send(one, replica)]
    return [one.request_id for one in sent]


def of_acme(*names: str, **fields) -> list[Request]:
    return [request(name, tenant=ACME, arrived_at=float(index), **fields) for index, name in enumerate(names)]


def test_as_many_requests_of_a_tenant_are_sent_as_may_run_on_all_replicas_together():
    gate = TenantGate()
    a, b, c, d = of_acme("a", "b", "c", "d")

    assert enter(gate, a, replica=0) + enter(gate, b, replica=1) + enter(gate, c, d) == ["a", "b"]
    assert [one.request_id for one in gate.held] == ["c", "d"]
    assert gate.end("b") == [c]
    gate.send(c, 1)
    assert gate.end("a") == [d]


def test_who_is_held_goes_by_arrival_and_a_priority_is_a_head_start():
    gate = TenantGate()
    first, second, late = of_acme("first", "second", "late")
    urgent = request("urgent", tenant=ACME, arrived_at=9.0, priority=1)
    enter(gate, *of_acme("x", "y"), first, second, late, urgent)

    assert [gate.position(one) for one in (first, second, late)] == [0, 1, 2]
    assert gate.end("x") == [urgent]


def test_a_queue_is_full_when_as_many_wait_at_the_gate_and_at_the_replicas_as_may():
    gate = TenantGate()
    enter(gate, *of_acme("a", "b", "c"))

    assert gate.fault_of(request("d", tenant=ACME)).code is FaultCode.QUEUE_FULL
    gate.seat("a", is_seated=True)
    assert gate.fault_of(request("d", tenant=ACME)) is None
    gate.seat("a", is_seated=False)  # it was preempted, and waits again
    assert gate.fault_of(request("d", tenant=ACME)).code is FaultCode.QUEUE_FULL


def test_a_limit_that_is_lifted_lets_the_next_request_in():
    gate = TenantGate()
    enter(gate, *of_acme("a", "b", "held"))
    free = request("free", tenant=Tenant(name="acme"))

    assert enter(gate, free) == ["free"]
    assert [one.request_id for one in gate.end("free")] == ["held"]


def test_other_tenants_and_those_without_limits_are_not_held():
    gate = TenantGate()
    enter(gate, *of_acme("a", "b"))

    assert enter(gate, request("c", tenant="other"), request("d")) == ["c", "d"]


def test_the_service_of_a_tenant_is_told_to_the_other_replicas_where_it_has_requests_beside_others():
    gate = TenantGate()
    enter(gate, request("a", tenant="one"), replica=0)
    enter(gate, request("b", tenant="one"), replica=2)
    assert gate.others_of("a", 0) == ("", ())  # it is alone, so that it takes from nobody

    enter(gate, request("c", tenant="two"), replica=2)
    assert gate.others_of("a", 0) == ("one", [2])
    gate.end("b")
    assert gate.others_of("a", 0) == ("one", [])


@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_sum_is_never_above_the_limit_and_whoever_is_held_is_sent_in_the_end(most, dice):
    gate, tenant = TenantGate(), Tenant(name="acme", max_running=most)
    coming = [request(str(number), prompt=(5,), tenant=tenant, arrived_at=float(number)) for number in range(12)]
    sent: set[str] = set()
    while coming or sent or [*gate.held]:
        held = [one.request_id for one in gate.held]
        if coming and (not sent or dice.random() < 0.5):
            sent.update(enter(gate, coming.pop(0)))
        else:
            gone = dice.choice([*sorted(sent), *held])
            sent.discard(gone)
            for due in gate.end(gone):
                gate.send(due, 0)
                sent.add(due.request_id)
        assert len(sent) == most or (len(sent) < most and not [*gate.held])
