"""What other engines give a tenant counts here too, while the tenant has requests here; it never starves for it."""

from __future__ import annotations

from rota.core.messages import ServedElsewhere
from tests.scheduler.stage import Stage, seated

LONG = 400


def two_tenants(rows: int = 1) -> Stage:
    """One row is taken by a third tenant, and one request each of two others waits for it."""
    stage = Stage(adapters=0, rows=rows)
    stage.ask("runs", tenant="first", max_new_tokens=3)
    stage.step()
    stage.ask("b0", tenant="elsewhere", max_new_tokens=LONG)
    stage.ask("c0", tenant="here", max_new_tokens=LONG)
    return stage


def order(stage: Stage, steps: int = 12) -> list[str]:
    return [request_id for _ in range(steps) for request_id in seated(stage.step())]


def test_a_tenant_that_other_engines_have_served_comes_after_one_that_they_have_not():
    alone, told = two_tenants(), two_tenants()
    told.tell(ServedElsewhere("elsewhere", 5000, 5000))

    assert order(alone)[0] == "b0"
    assert order(told)[0] == "c0"


def test_service_elsewhere_of_a_tenant_that_has_no_request_here_is_nothing():
    stage = two_tenants()
    stage.tell(ServedElsewhere("stranger", 5000, 5000))
    stage.ask("s0", tenant="stranger")

    assert "stranger" in stage.scheduler._state.accounts.active
    assert order(stage)[0] == "b0"


def test_a_tenant_that_other_engines_serve_all_the_time_still_gets_its_share_of_the_rows_here():
    stage = Stage(adapters=0, rows=8)
    for number in range(20):
        stage.ask(f"burst{number:02d}", tenant="burst", max_new_tokens=LONG)
    stage.step()
    for number in range(6):
        stage.ask(f"late{number}", tenant="late", max_new_tokens=LONG)
    for _ in range(8):
        stage.tell(ServedElsewhere("late", 100_000, 100_000))
        stage.step()

    accounts = stage.scheduler._state.accounts.active
    assert (accounts["burst"].rows, accounts["late"].rows) == (4, 4)
