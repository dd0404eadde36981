"""Rows are for sequences that run: a parked sequence keeps its row only while no other sequence needs it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import (
    Admitted,
    Explained,
    Finished,
    FinishReason,
    Inspected,
    Preempted,
    SlotChanged,
    SlotState,
    Whereabouts,
)
from rota.core.ids import AdapterId, RequestId, Row
from rota.core.messages import Explain, Inspect, Message
from rota.core.plan import StepPlan
from rota.core.policy_config import PolicyConfig
from rota.core.tenant import Tenant
from rota.policy.slot_policies import SLOT_POLICIES
from rota.scheduler.rows import RowLedger
from rota.scheduler.sequence import Reason, Sequence
from rota.scheduler.state import GroupSizes
from tests.builders import add_adapter, capacity, request
from tests.fakes import FakeDevice
from tests.policy.newest_first import NewestFirst
from tests.scheduler.balance import check_sizes
from tests.scheduler.stage import Stage, seated
from tests.worlds import endings, serve

# Turns that a test can foresee: after a second in a slot, an adapter leaves.
TURNS = PolicyConfig(lora_policy="newest-first", lora_rotation_quantum_ms=1000.0)
LONG = {"max_new_tokens": 400}
RESTLESS = PolicyConfig(lora_policy="rotate", lora_rotation_quantum_ms=500.0, lora_max_stall_ms=1000.0)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(SLOT_POLICIES, "newest-first", NewestFirst.from_config)


def of(stage: Stage, id: str) -> Sequence:
    return stage.scheduler._state.sequences[RequestId(id)]


def turn(stage: Stage, seconds: float = 3.0) -> list[StepPlan]:
    """Let time pass until an adapter has come into a slot; gives the steps since then."""
    plans = [stage.step(at=stage.now + seconds)]
    for load in plans[-1].loads:
        stage.arrive(load.adapter_id)
    plans.append(stage.step())
    return plans


def parked(rows: int, **found) -> Stage:
    """The first adapter's request is parked, and the second adapter's runs; one slot."""
    stage = Stage(slots=1, policy=TURNS, rows=rows, **found)
    stage.seat(1)
    stage.ask("second", adapter=2, **LONG)
    turn(stage)
    assert of(stage, "second").holds_kv
    return stage


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("parked_rows", "available", "in_use", "first"),
    [
        ([(1, 2)], 3, 1, 1),
        ([(1, 1), (2, 2)], 4, 0, 2),  # the last one that lost its slot
        ([(1, 1), (2, 2), (2, 0)], 2, 2, 1),
        ([(1, 2), (2, 1), (1, 1)], 3, 1, 2),  # one row less changes no order
        ([(1, 1), (2, 1), (1, 0), (1, 1)], 3, 1, 1),  # it had a slot meanwhile
    ],
)
def test_rows_of_parked_sequences_may_be_taken_the_last_ones_first(parked_rows, available, in_use, first):
    rows = RowLedger(4)
    for _ in range(3):
        rows.take()
    for adapter, count in parked_rows:
        rows.note_parked(AdapterId(adapter), count)

    assert (rows.available, rows.in_use, rows.first_to_give()) == (available, in_use, first)


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_crowds_know_the_sum_of_the_largest(slots, changes):
    counted, sizes = GroupSizes(slots), [0] * 6
    for one, grows in changes:
        if grows:
            after = sorted([*sizes[:one], sizes[one] + 1, *sizes[one + 1 :]])
            assert counted.most_after(sizes[one]) == sum(after[6 - slots :])
            counted.grow(sizes[one])
            sizes[one] += 1
        elif sizes[one]:
            counted.shrink(sizes[one])
            sizes[one] -= 1
        check_sizes(counted, [size for size in sizes if size])


# ── who gives up a row ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_parked_sequence_keeps_its_row_while_there_are_others():
    stage = parked(rows=2)
    row = of(stage, "runs1").row

    (_, back) = turn(stage)

    assert of(stage, "runs1").row == row
    assert back.seats == (), "it goes on in its row"
    assert row in back.decodes


def crowded() -> Stage:
    """Two rows, one slot: a base request runs, the second adapter's too, and the first adapter's has no row."""
    stage = parked(rows=2)
    stage.ask("base", **LONG)
    stage.step()
    return stage


def test_a_newcomer_takes_the_row_of_a_parked_sequence_which_keeps_its_kv():
    stage = parked(rows=2)
    row, blocks = of(stage, "runs1").row, list(of(stage, "runs1").blocks)
    stage.ask("base", **LONG)
    plan = stage.step()

    assert [(seat.request_id, seat.row) for seat in plan.seats] == [("base", row)]
    assert (of(stage, "runs1").row, of(stage, "runs1").blocks) == (None, blocks)
    assert stage.said(Preempted) == []


def test_it_sits_down_again_with_its_tokens_and_blocks_and_decodes_at_once():
    stage = crowded()
    sequence = of(stage, "runs1")
    tokens, blocks = tuple(sequence.tokens), tuple(sequence.blocks)
    assert len(stage.said(Admitted)) == 3
    plan = turn(stage)[-1]

    (seat,) = plan.seats
    assert (seat.request_id, seat.tokens, seat.blocks) == ("runs1", tokens, blocks)
    assert seat.computed == len(tokens) - 1
    assert plan.chunks == (), "nothing is computed anew"
    assert seat.row in plan.decodes
    assert of(stage, "second").row is None
    assert stage.said(Admitted) == [], "it was admitted before"


def test_the_newest_sequence_of_the_adapter_that_left_last_gives_up_its_row_first():
    stage = Stage(adapters=3, slots=1, policy=TURNS, rows=5)
    stage.seat(1)
    for number in range(2):
        stage.ask(f"second{number}", adapter=2, at=number / 10, **LONG)
    turn(stage)
    stage.ask("third", adapter=3, **LONG)
    turn(stage)
    assert of(stage, "third").holds_kv
    lost = []
    for number in range(3):
        stage.ask(f"base{number}", **LONG)
        stage.step()
        lost.append([id for id in ("runs1", "second0", "second1") if of(stage, id).row is None])

    assert lost == [[], ["second1"], ["second0", "second1"]], "one row was free"


def test_rows_of_sequences_that_run_are_not_taken():
    stage = Stage(slots=2, policy=TURNS, rows=2)
    stage.seat(1, 2)
    stage.ask("newcomer", adapter=1)
    stage.step(at=0.5)

    assert stage.why("newcomer") == Reason.NO_ROW


def test_whichever_adapter_has_its_turn_there_is_a_row_for_each_of_its_sequences():
    stage = Stage(adapters=3, slots=1, policy=TURNS, rows=4)
    stage.seat(1)
    for number in range(2):
        stage.ask(f"second{number}", adapter=2, **LONG)
    turn(stage)
    for number in range(3):
        stage.ask(f"base{number}", **LONG)
    stage.step()
    assert stage.why("base2") == Reason.NO_ROW, (
        "in the second adapter's turn two rows are needed beside two of the base"
    )
    stage.ask("first again", adapter=1, **LONG)
    stage.ask("second again", adapter=2, **LONG)
    for _ in range(6):
        turn(stage)
        stage.step()
        open_groups = stage.scheduler._state.open_groups
        assert not any(group.rowless for group in open_groups)

    assert of(stage, "first again").holds_kv, "the first adapter has no more than the second then"
    assert not of(stage, "second again").holds_kv, "it would be one too many beside the base"


@pytest.mark.parametrize(("rows", "starts"), [(4, []), (5, ["again"])])
def test_one_more_starts_only_if_each_that_is_parked_would_have_a_row_beside_it(rows, starts):
    stage = Stage(adapters=3, slots=2, policy=TURNS, rows=rows)
    for number in range(3):
        stage.ask(f"parked{number}", adapter=3, **LONG)
    stage.step()
    stage.arrive(3)
    stage.step(at=0.5)
    stage.ask("runs", adapter=1, **LONG)
    stage.step()
    stage.arrive(1)
    stage.step()
    stage.ask("comes", adapter=2, **LONG)
    stage.ask("again", adapter=1, **LONG)
    stage.ask("base", at=0.6, **LONG)
    plan = stage.step(at=4.0)

    assert [event.adapter_id for event in stage.said(SlotChanged) if event.state is SlotState.EMPTY] == [3]
    assert seated(plan) == starts
    assert stage.why("base") == Reason.NO_ROW, "it would be beside all of these"


def test_one_that_holds_kv_goes_before_newcomers():
    stage = crowded()
    stage.ask("newcomer", adapter=1, at=-50.0)
    plan = turn(stage)[-1]

    assert seated(plan) == ["runs1"]
    assert stage.why("newcomer") == Reason.NO_ROW


# ── what becomes of it ───────────────────────────────────────────────────────────────────────────────────────────────


def test_one_without_a_row_may_leave_and_gives_back_its_kv():
    stage = crowded()
    stage.leave("runs1")
    stage.leave("second")
    stage.leave("base")
    stage.step()

    assert stage.scheduler.is_idle
    assert len(stage.said(Finished)) == 3
    assert stage.scheduler._state.blocks.free == stage.scheduler._state.blocks.total


def test_one_without_a_row_is_told_why_it_is_parked():
    stage = crowded()
    stage.tell(Explain(RequestId("runs1"), stage.now))
    stage.tell(Inspect(stage.now))
    stage.step()

    (answer,), (inspected,) = stage.said(Explained), stage.said(Inspected)
    assert (answer.state, answer.reason) == (Whereabouts.PARKED, Reason.NOT_IN_SLOT)
    assert {one.adapter_id: (one.running, one.parked) for one in inspected.adapters} == {
        0: (1, 0),
        1: (0, 1),
        2: (1, 0),
    }
    assert inspected.rows == 2


def test_one_that_lacks_a_row_only_says_since_when():
    stage = Stage(slots=2, policy=TURNS, rows=2)
    stage.seat(1, 2)
    lost_at = stage.scheduler._state.groups[AdapterId(1)].ran_at
    stage.scheduler._state.lose_row(of(stage, "runs1"))
    stage.ask("base", **LONG)
    plan = stage.scheduler.plan(5.0)
    assert seated(plan) == ["runs1"]
    stage.finish(plan)
    stage.scheduler._state.lose_row(of(stage, "runs1"))
    of(stage, "runs1").steps_in_flight += 1  # so that it does not sit down at once
    stage.step(at=6.0)
    stage.tell(Explain(RequestId("runs1"), 7.0))
    of(stage, "runs1").steps_in_flight -= 1
    stage.finish(stage.scheduler.plan(7.0))

    (answer,) = stage.said(Explained)
    assert (answer.state, answer.reason, answer.since) == (Whereabouts.PARKED, Reason.NO_ROW, 5.0)
    assert lost_at == 0.0


def test_a_sequence_with_a_step_in_flight_gives_up_its_row_and_sits_down_when_its_token_is_known():
    stage = Stage(slots=1, policy=TURNS, rows=1, config=SchedulerConfig(overlap_depth=2))
    stage.seat(1)
    stage.ask("second", adapter=2, **LONG)
    state, sequence = stage.scheduler._state, of(stage, "runs1")
    in_flight = stage.scheduler.plan(stage.now)
    assert sequence.steps_in_flight == 1
    state.lose_row(sequence)
    between = stage.scheduler.plan(stage.now)
    assert between.seats == between.decodes == (), "its newest token is not known yet"
    stage.finish(in_flight, token=42)
    plan = stage.scheduler.plan(stage.now)

    (seat,) = plan.seats
    assert seat.tokens[-1] == 42
    assert seat.computed == len(seat.tokens) - 1
    assert plan.decodes == (Row(0),)
    stage.finish(between)
    stage.finish(plan)


def test_a_prompt_that_lost_its_row_goes_on_where_it_was():
    stage = Stage(slots=1, policy=TURNS, rows=1, config=SchedulerConfig(chunked_prefill_size=8))
    stage.ask("long", adapter=1, prompt=20)
    stage.step()
    stage.arrive(1)
    assert [(chunk.start, chunk.length) for chunk in stage.step().chunks] == [(0, 8)]
    stage.scheduler._state.lose_row(of(stage, "long"))
    plan = stage.step()

    assert [seat.computed for seat in plan.seats] == [8]
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(8, 8)]


def test_one_without_a_row_is_the_first_to_give_up_its_kv():
    stage = Stage(slots=1, policy=TURNS, rows=3, blocks=5, block_size=4, config=SchedulerConfig())
    stage.ask("first", prompt=3, **LONG)
    stage.ask("second", prompt=3, at=0.1, **LONG)
    stage.step()
    stage.scheduler._state.lose_row(of(stage, "first"))
    of(stage, "first").steps_in_flight += 1  # so that it does not sit down at once
    for _ in range(15):
        stage.step()

    assert [event.request_id for event in stage.said(Preempted)] == ["first"]


# ── tenants and the delayer ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_limit_of_a_key_counts_sequences_without_a_row():
    narrow = Tenant(name="narrow", max_running=1)
    stage = Stage(adapters=0, rows=4)
    stage.ask("first", tenant=narrow, **LONG)
    stage.step()
    stage.scheduler._state.lose_row(of(stage, "first"))
    of(stage, "first").steps_in_flight += 1
    stage.ask("second", tenant=narrow)
    stage.step()

    assert stage.why("second") == Reason.TENANT_FULL


def test_a_tenant_below_its_share_of_rows_gets_one_for_its_sequence_that_holds_kv():
    stage = Stage(adapters=0, rows=4)
    stage.ask("mine", tenant="mine", **LONG)
    for number in range(3):
        stage.ask(f"burst{number}", tenant="burst", **LONG)
    stage.step()
    stage.scheduler._state.lose_row(of(stage, "mine"))
    of(stage, "mine").steps_in_flight += 1  # so that it does not sit down at once
    stage.ask("third", tenant="third", **LONG)
    assert seated(stage.step()) == ["third"]
    of(stage, "mine").steps_in_flight -= 1

    assert seated(stage.step()) == ["mine"]
    assert [event.request_id for event in stage.said(Preempted)] == ["burst2"]


def test_as_many_sit_down_again_in_a_pass_as_there_are_rows():
    stage = Stage(adapters=0, rows=3)
    for number in range(3):
        stage.ask(f"r{number}", **LONG)
    stage.step()
    for number in (1, 2):
        stage.scheduler._state.lose_row(of(stage, f"r{number}"))

    assert seated(stage.step()) == ["r1", "r2"]


def test_no_tenant_gives_up_its_last_row_though_another_sequence_of_it_holds_kv():
    stage = Stage(adapters=0, rows=2)
    for number in range(2):
        stage.ask(f"burst{number}", tenant="burst", **LONG)
    stage.step()
    stage.scheduler._state.lose_row(of(stage, "burst1"))
    of(stage, "burst1").steps_in_flight += 1  # so that it does not sit down at once
    stage.ask("second", tenant="second", **LONG)
    assert seated(stage.step()) == ["second"]
    stage.ask("third", tenant="third", **LONG)

    assert seated(stage.step()) == []
    assert stage.said(Preempted) == []


def test_the_delayer_counts_the_rows_of_sequences_that_run():
    policy = replace(TURNS, enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5)
    stage = Stage(slots=1, policy=policy, rows=8)
    stage.seat(1, **LONG)
    stage.ask("second", adapter=2, **LONG)
    for _ in range(2):
        turn(stage)
    state = stage.scheduler._state

    assert (state.running_count, state.rows.free) == (2, 6)
    assert (state.rows.in_use, state.rows.available) == (1, 7)


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_change_hands_nearly_every_step_and_no_prompt_is_computed_twice():
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in range(1, 7)]
    for number in range(18):
        adapter = AdapterId(1 + number % 6)
        asked = request(f"r{number}", prompt=20, max_new_tokens=30, arrived_at=1.0 + number / 9, adapter=adapter)
        messages.append((asked.arrived_at, asked))
    for depth in (1, 2):
        found = capacity(blocks=200, rows=4, slots=2)
        device = FakeDevice(found)
        config = SchedulerConfig(enable_prefix_caching=False)
        events = serve(messages, device, config, depth, RESTLESS)

        assert all(end.reason is FinishReason.LENGTH for end in endings(events).values())
        chunks = [chunk for plan in device.plans for chunk in plan.chunks]
        assert sum(chunk.length for chunk in chunks) == 18 * 20
        resumed = sum(seat.row in plan.decodes for plan in device.plans for seat in plan.seats)
        assert resumed > len(device.plans) // 4


def test_one_without_a_row_goes_on_when_the_one_that_has_the_row_gives_up_its_kv():
    """`grows` holds the only row and gives up its KV. Nothing else happens, and `urgent` must have the row then."""
    asked = [
        request("short", prompt=1, max_new_tokens=1, adapter=AdapterId(2)),
        request(
            "urgent",
            prompt=1,
            max_new_tokens=4,
            adapter=AdapterId(1),
            tenant=Tenant(name="heavy", weight=3.0),
            priority=1,
        ),
        request("grows", prompt=9, max_new_tokens=25, adapter=AdapterId(1)),
    ]
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in (1, 2)]
    messages += [(0.0, one) for one in asked]
    found = capacity(blocks=5, block_size=8, rows=1, slots=1)
    config = SchedulerConfig(chunked_prefill_size=6, enable_prefix_caching=False)
    lora = LoraConfig(max_loaded_loras=1, enable_lora_overlap_loading=False)
    events = serve(messages, FakeDevice(found), config, 1, PolicyConfig(lora_policy="rotate"), lora, 0.1)

    assert len(endings(events)) == len(asked)


def test_nobody_is_preempted_for_an_urgent_request_that_gets_no_row_by_it():
    """`parked` is as urgent as `urgent`, and its turn needs the only row; so to preempt `begins` would help nobody."""
    asked = [
        request("first", prompt=9, max_new_tokens=8),
        request("begins", prompt=4, max_new_tokens=9, adapter=AdapterId(2)),
        request("parked", prompt=26, max_new_tokens=19, adapter=AdapterId(3), arrived_at=10.0, priority=1),
        request("urgent", prompt=13, max_new_tokens=29, arrived_at=11.0, priority=1),
    ]
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in (2, 3)]
    messages += [(one.arrived_at, one) for one in asked]
    found = capacity(blocks=26, block_size=8, rows=1, slots=1)
    config = SchedulerConfig(chunked_prefill_size=10, enable_prefix_caching=False)
    lora = LoraConfig(enable_lora_overlap_loading=False)
    events = serve(messages, FakeDevice(found), config, 2, RESTLESS, lora)

    assert len(endings(events)) == len(asked)
