"""Tenants share rows, KV, prompts' part of a step and slots; without limits, no tenant can starve another."""

from __future__ import annotations

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import FaultCode
from rota.core.events import Admitted, Finished, Preempted, SlotChanged, SlotState
from rota.core.tenant import Tenant
from rota.policy.fairness import gives_up, units
from rota.scheduler import preemption
from rota.scheduler.accounts import Accounts
from rota.scheduler.sequence import Reason
from rota.scheduler.turns import MOST_COPIES
from tests.counting import calls_in
from tests.scheduler.stage import Stage, seated

LONG = 400


def crowd(stage: Stage, count: int, tenant: Tenant | str = "burst", **fields) -> None:
    for number in range(count):
        stage.ask(f"burst{number:02d}", tenant=tenant, **{"max_new_tokens": LONG, **fields})


def preempted(stage: Stage) -> list[str]:
    return [event.request_id for event in stage.said(Preempted)]


def rows_by(stage: Stage, tenant: str) -> int:
    account = stage.scheduler._state.accounts.active.get(tenant)
    return account.rows if account else 0


def test_a_neighbour_gets_a_row_at_once_though_another_tenant_has_taken_all():
    stage = Stage(adapters=0, rows=8)
    crowd(stage, 20)
    stage.step()

    stage.ask("neighbour0", tenant="neighbour")

    assert seated(stage.step()) == ["neighbour0"]
    assert preempted(stage) == ["burst07"], "the newest of those that run"
    assert stage.why("burst07") == Reason.OTHER_TENANT


def test_a_sequence_that_made_room_goes_on_when_the_neighbour_has_ended():
    stage = Stage(adapters=0, rows=2)
    crowd(stage, 2)
    stage.step()
    stage.ask("neighbour0", tenant="neighbour", max_new_tokens=1)
    stage.step()
    for _ in range(3):
        stage.step()

    assert rows_by(stage, "burst") == 2
    assert [event.request_id for event in stage.said(Finished)] == ["neighbour0"]
    back = [event for event in stage.said(Admitted) if event.request_id == "burst01"][-1]
    assert Reason.OTHER_TENANT in back.reasons


def test_rows_are_taken_from_others_only_up_to_a_tenants_share_by_weight():
    stage = Stage(adapters=0, rows=8)
    crowd(stage, 20, Tenant(name="burst", weight=3.0))
    stage.step()
    for number in range(6):
        stage.ask(f"late{number}", tenant="late", max_new_tokens=LONG)
    for _ in range(6):
        stage.step()

    assert (rows_by(stage, "burst"), rows_by(stage, "late")) == (6, 2)
    assert stage.why("late2") == Reason.OTHER_TENANT


def test_what_a_tenant_leaves_is_shared_by_the_others_anew():
    stage = Stage(adapters=0, rows=12)
    crowd(stage, 20)
    stage.step()
    stage.ask("leaves", tenant="third", max_new_tokens=LONG)
    for number in range(8):
        stage.ask(f"late{number}", tenant="late", max_new_tokens=LONG)
    for _ in range(6):
        stage.step()
    assert (rows_by(stage, "burst"), rows_by(stage, "late")) == (7, 4)
    stage.leave("leaves")
    for _ in range(6):
        stage.step()

    assert (rows_by(stage, "burst"), rows_by(stage, "late")) == (6, 6)


def test_one_tenant_alone_is_never_preempted_for_itself():
    stage = Stage(adapters=0, rows=2)
    crowd(stage, 9)
    for _ in range(5):
        stage.step()

    assert preempted(stage) == []
    assert stage.why("burst02") == Reason.NO_ROW


def test_free_rows_go_to_the_tenant_that_has_got_least():
    stage = Stage(adapters=0, rows=5)
    crowd(stage, 9, max_new_tokens=16)
    stage.step()
    for number in range(4):
        stage.ask(f"late{number}", tenant="late", max_new_tokens=16)
    order = [request_id for _ in range(20) for request_id in seated(stage.step())]

    assert order[:2] == ["late0", "late1"], "two of five rows are the share of `late`"
    assert order[2:4] == ["late2", "late3"], "three rows of `burst` have got more than two of `late`"


def test_a_neighbour_gets_kv_though_another_tenant_holds_all_of_it():
    stage = Stage(adapters=0, rows=8, blocks=32, max_sequence_tokens=LONG)
    crowd(stage, 8, prompt=50)
    for _ in range(60):
        stage.step()
    assert stage.scheduler._state.blocks.free <= 4

    stage.said(Preempted)
    stage.ask("neighbour0", tenant="neighbour", prompt=40, max_new_tokens=30)
    waited = 0
    while "neighbour0" not in seated(stage.step()):
        waited += 1
    for _ in range(30):
        stage.step()

    assert waited <= 1
    assert "neighbour0" not in preempted(stage)
    assert "neighbour0" in [event.request_id for event in stage.said(Finished)]


def test_a_request_larger_than_its_tenants_share_of_kv_still_gets_its_turn():
    stage = Stage(adapters=0, rows=8, blocks=32, max_sequence_tokens=LONG)
    crowd(stage, 8, prompt=40)
    stage.step()
    stage.ask("large", tenant="large", prompt=330, max_new_tokens=4)
    for _ in range(10):
        stage.step()

    assert "large" in [event.request_id for event in stage.said(Finished)]


def test_nothing_is_preempted_for_a_request_that_would_not_fit_all_the_same():
    stage = Stage(adapters=0, rows=8, blocks=32, max_sequence_tokens=LONG)
    for tenant in ("a", "b"):
        stage.ask(f"{tenant}-old", tenant=tenant, prompt=120, max_new_tokens=100)
        stage.now += 1.0
        stage.ask(f"{tenant}-new", tenant=tenant, prompt=30, max_new_tokens=20)
    stage.step()
    stage.ask("large", tenant="large", prompt=350, max_new_tokens=4)
    stage.ask("small", tenant="small", prompt=10, max_new_tokens=4)
    assert seated(stage.step()) == ["small"]
    for _ in range(10):
        stage.step()

    assert preempted(stage) == [], "the two old sequences alone leave too little"
    assert stage.why("large") == Reason.NO_KV


def test_a_tenant_has_got_what_its_tokens_cost_for_its_weight():
    stage = Stage(adapters=0, rows=8)
    stage.ask("light", tenant="light", max_new_tokens=LONG)
    crowd(stage, 3, Tenant(name="heavy", weight=2.0))
    stage.step()
    accounts = stage.scheduler._state.accounts.active
    before = {name: account.service_s for name, account in accounts.items()}
    stage.step()
    got = {name: account.service_s - before[name] for name, account in accounts.items()}

    assert got["heavy"] == pytest.approx(3 * got["light"] / 2)


@pytest.mark.parametrize("others", [(), ("b",)])
def test_a_decode_costs_a_tenant_the_same_alone_and_beside_others(others):
    stage = Stage(adapters=0, rows=8)
    for tenant in ("a", *others):
        stage.ask(f"of {tenant}", tenant=tenant, max_new_tokens=LONG)
    stage.step()
    accounts = stage.scheduler._state.accounts
    before, unit_s = accounts.active["a"].service_s, accounts._unit_s
    stage.step()
    assert accounts.active["a"].service_s - before == pytest.approx(units(0, 1) * unit_s)


def test_tenants_are_looked_at_by_what_they_have_got_and_the_others_in_their_turn():
    accounts = Accounts()
    opened = [accounts.open(Tenant(name=name)) for name in "abcd"]
    for account, got in zip(opened, (3.0, 1.0, 2.0, 4.0), strict=True):
        account.service_s = got

    looks = ["".join(account.name for account in accounts.in_turn(1)) for _ in range(5)]
    assert looks == ["ba", "b", "bc", "bd", "ba"]


def test_base_requests_are_no_adapter_of_their_tenant():
    stage = Stage(adapters=1)
    stage.ask("base", tenant="a")
    stage.ask("adapted", adapter=1, tenant="a")
    assert [*stage.scheduler._state.accounts.active["a"].adapters] == [1]


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones_of_other_tenants():
    stage = Stage(adapters=0, rows=8, blocks=32, max_sequence_tokens=LONG)

    def ask_both(number: int) -> None:
        for tenant in ("a", "b"):
            stage.ask(f"{tenant}{number:03d}", tenant=tenant, prompt=90, max_new_tokens=5 + number % 11)

    for number in range(3):
        ask_both(number)
    stage.step()
    stage.ask("large", tenant="large", prompt=380, max_new_tokens=2)
    for number in range(3, 400):
        ask_both(number)
        stage.now += 0.01
        stage.step()

    assert "large" in [event.request_id for event in stage.said(Finished)]


def test_a_long_prompt_leaves_room_in_the_step_for_another_tenants_prompt():
    stage = Stage(adapters=0, rows=8, config=SchedulerConfig(chunked_prefill_size=64))
    stage.ask("long", tenant="burst", prompt=400)
    stage.step()
    stage.ask("short", tenant="neighbour", prompt=20)

    plan = stage.step()

    assert seated(plan) == ["short"]
    assert [chunk.length for chunk in plan.chunks] == [32, 20]


@pytest.mark.parametrize(("second_at", "reason"), [(3.0, Reason.OTHER_TENANT), (1.5, Reason.STEP_FULL)])
def test_a_request_waits_for_other_tenants_if_one_of_theirs_that_came_later_started(second_at, reason):
    stage = Stage(adapters=0, rows=8, config=SchedulerConfig(chunked_prefill_size=16))
    first = Tenant(name="first", priority=1)
    for id, at in (("first0", 1.0), ("first1", second_at)):
        stage.ask(id, tenant=first, at=at, prompt=8)
    stage.ask("waits", tenant="second", at=2.0, prompt=8)

    assert seated(stage.step(at=4.0)) == ["first0", "first1"]
    assert stage.why("waits") == reason


def test_a_long_prompt_alone_fills_the_step():
    stage = Stage(adapters=0, rows=8, config=SchedulerConfig(chunked_prefill_size=64))
    stage.ask("long", tenant="burst", prompt=400)
    stage.step()

    assert [chunk.length for chunk in stage.step().chunks] == [64]


def test_a_tenant_runs_no_more_than_it_may_and_others_pass_it():
    stage = Stage(adapters=0, rows=8)
    crowd(stage, 5, Tenant(name="burst", max_running=2))
    stage.ask("neighbour0", tenant="neighbour")

    assert sorted(seated(stage.step())) == ["burst00", "burst01", "neighbour0"]
    assert stage.why("burst02") == Reason.TENANT_FULL


def test_nobody_makes_room_for_a_tenant_that_runs_as_many_as_it_may():
    stage = Stage(adapters=0, rows=4)
    full = Tenant(name="full", max_running=1)
    stage.ask("runs", tenant=full, max_new_tokens=LONG)
    crowd(stage, 3)
    stage.step()
    stage.ask("waits", tenant=full)
    for _ in range(3):
        stage.step()

    assert preempted(stage) == []
    assert len(stage.step().decodes) == 4


def test_a_tenant_queues_no_more_than_it_may_and_others_do():
    stage = Stage(adapters=0, rows=1)
    crowd(stage, 4, Tenant(name="burst", max_queued=3))
    stage.ask("neighbour0", tenant="neighbour")
    stage.step()

    refused = stage.said(Finished)
    assert [(event.request_id, event.fault.code) for event in refused] == [("burst03", FaultCode.QUEUE_FULL)]
    assert "max_queued" in refused[0].fault.message


def test_a_tenant_with_one_adapter_keeps_a_slot_while_another_tenant_rotates_many():
    stage = Stage(adapters=5, slots=2, rows=16)
    for number in range(1, 5):
        stage.ask(f"many{number}", number, tenant="many", max_new_tokens=LONG)
    stage.step()
    stage.arrive(1, 2)
    stage.step()

    stage.ask("one", 5, tenant="one", max_new_tokens=LONG)

    assert [load.adapter_id for load in stage.step().loads] == [5], "at once, though the policy is `wait`"
    stage.arrive(5)
    assert "one" in seated(stage.step())


def test_a_tenant_whose_share_is_below_one_slot_still_gets_one():
    """Three tenants share two slots: two thirds of a slot for each."""
    stage = Stage(adapters=4, slots=2, rows=16)
    for number in (1, 2):
        stage.ask(f"many{number}", number, tenant="many", max_new_tokens=LONG)
    stage.step()
    stage.arrive(1, 2)
    stage.step()
    stage.ask("base", tenant="third", max_new_tokens=LONG)
    stage.step()

    stage.ask("one", 3, tenant="one", max_new_tokens=LONG)
    assert [load.adapter_id for load in stage.step().loads] == [3]

    stage.arrive(3)
    stage.step()
    stage.ask("another", 4, tenant="one", max_new_tokens=LONG)
    assert not stage.step().loads, "a second one would be more than its share"


def test_a_tenant_that_runs_as_many_as_it_may_gets_no_slot_for_one_that_could_not_start():
    stage = Stage(adapters=3, slots=2, rows=16)
    for number in (1, 2):
        stage.ask(f"many{number}", number, tenant="many", max_new_tokens=LONG)
    full = Tenant(name="full", max_running=1)
    stage.ask("runs", tenant=full, max_new_tokens=LONG)
    stage.step()
    stage.arrive(1, 2)
    stage.step()

    stage.ask("waits", 3, tenant=full, max_new_tokens=LONG)
    assert not stage.step().loads
    stage.leave("runs")
    assert [load.adapter_id for load in stage.step().loads] == [3]


def test_a_tenant_gets_no_slot_from_others_beyond_its_share_of_them():
    stage = Stage(adapters=4, slots=3, rows=16)
    for number in (1, 2):
        stage.ask(f"many{number}", number, tenant="many", max_new_tokens=LONG)
    stage.ask("one", 3, tenant="one", max_new_tokens=LONG)
    stage.step()
    stage.arrive(1, 2, 3)
    stage.step()
    stage.ask("another", 4, tenant="one", max_new_tokens=LONG)

    assert not stage.step().loads, "each has a share of one and a half"


def test_a_tenant_gets_as_many_slots_as_its_share_at_once():
    stage = Stage(adapters=5, slots=4, rows=16)
    for number in (1, 2, 3):
        stage.ask(f"many{number}", number, tenant="many", max_new_tokens=LONG)
    stage.ask("one", 4, tenant="one", max_new_tokens=LONG)
    stage.step()
    stage.arrive(1, 2, 3, 4)
    stage.step()
    stage.ask("another", 5, tenant="one", max_new_tokens=LONG)

    assert [load.adapter_id for load in stage.step().loads] == [5], "each has a share of two"


def test_of_tenants_above_their_share_the_one_with_most_slots_for_its_weight_gives_one_up():
    stage = Stage(adapters=6, slots=5, rows=16)
    for number in (1, 2):
        stage.ask(f"light{number}", number, tenant="light", max_new_tokens=LONG)
    for number in (3, 4, 5):
        stage.ask(f"heavy{number}", number, tenant=Tenant(name="heavy", weight=2.0), max_new_tokens=LONG)
    stage.step()
    stage.arrive(1, 2, 3, 4, 5)
    stage.step()
    stage.said(SlotChanged)
    stage.ask("one", 6, tenant="one", max_new_tokens=LONG)
    stage.step()

    (leaver,) = (one.adapter_id for one in stage.said(SlotChanged) if one.state is SlotState.EMPTY)
    assert leaver in (1, 2), "two for a weight of one, and three for a weight of two"


def test_slots_that_tenants_get_at_once_are_no_more_than_copies_may_be_under_way():
    stage = Stage(adapters=9, slots=5, rows=16)
    for number in range(1, 6):
        stage.ask(f"many{number}", number, tenant="many", max_new_tokens=LONG)
    stage.step()
    stage.arrive(1, 2, 3, 4, 5)
    stage.step()
    for number in (6, 7, 8, 9):
        stage.ask(f"one{number}", number, tenant=f"tenant{number}", max_new_tokens=LONG)

    assert len(stage.step().loads) == MOST_COPIES


def test_requests_find_each_others_kv_only_within_one_scope():
    stage = Stage(adapters=0, rows=8)
    prompt = tuple(range(100, 140))
    for scope in ("acme", "other", "acme", ""):
        stage.ask(f"r{stage.now}", prompt=prompt, cache_scope=scope, max_new_tokens=1)
        stage.step()
        stage.now += 1.0

    assert [event.cached_tokens for event in stage.said(Admitted)] == [0, 0, 32, 0]


def test_what_no_tenant_gives_up_is_asked_for_once_a_pass_however_many_wait(monkeypatch):
    stage = Stage(adapters=0, rows=8)
    for number in range(40):
        stage.ask(f"r{number}", tenant=f"tenant{number}", max_new_tokens=LONG)
    stage.step()
    asked = []

    def counted(*given):
        asked.append(given)
        return gives_up(*given)

    monkeypatch.setattr(preemption, "gives_up", counted)
    stage.step()

    assert len(asked) == 1
    assert preempted(stage) == []


def test_a_pass_over_a_thousand_tenants_costs_as_much_as_over_fifty():
    def cost(tenants: int) -> int:
        stage = Stage(adapters=0, rows=8)
        for number in range(tenants):
            stage.ask(f"r{number}", tenant=f"tenant{number}", max_new_tokens=LONG)
        stage.step()
        costs = []
        for _ in range(20):
            calls, plan = calls_in(lambda: stage.scheduler.plan(stage.now))
            stage.finish(plan)
            costs.append(calls)
        return max(costs)

    assert cost(1000) < 1.2 * cost(50)
