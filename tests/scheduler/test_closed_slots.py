"""Slots that close under their residents, because a large adapter wants one: the others wait, and not for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rota.core.config import LoraConfig
from rota.core.errors import FaultCode
from rota.core.events import AdapterAdded, AdapterRefused, Finished, FinishReason, Inspected, SlotChanged, SlotState
from rota.core.ids import AdapterId
from rota.core.messages import Inspect
from rota.core.policy_config import PolicyConfig
from tests.builders import add_adapter
from tests.scheduler.stage import Stage, loads, seated

DRAIN = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=0.5)
ROTATE = PolicyConfig(lora_policy="rotate")


def crowded(policy: PolicyConfig | None = None, **fields) -> Stage:
    """Three slots, six pages, and three residents of two pages each that run. Adapter 4 takes four."""
    given = {"policy": policy} if policy else {}
    stage = Stage(3, sizes=(2, 2, 2), slots=3, pages=6, **given, **fields)
    stage.seat(1, 2, 3, max_new_tokens=100)
    stage.tell(add_adapter(4))
    stage.step()
    stage.read(4, pages=4)
    return stage


def residents(stage: Stage) -> set[int]:
    last = {event.slot: event for event in stage.events if isinstance(event, SlotChanged)}
    return {event.adapter_id for event in last.values() if event.state is not SlotState.EMPTY}


def inspected(stage: Stage) -> Inspected:
    stage.tell(Inspect(stage.now))
    stage.step()
    return stage.said(Inspected)[-1]


def test_while_it_only_is_known_everybody_stays():
    stage = crowded()
    for _ in range(5):
        assert len(stage.step().decodes) == 3
    assert residents(stage) == {1, 2, 3}
    found = inspected(stage)
    assert (found.slots, found.pages, found.pages_used) == (3, 6, 6)


def test_under_wait_it_comes_when_enough_residents_are_idle_and_each_leaves_as_soon_as_it_is():
    stage = crowded()
    stage.ask("large", adapter=4)
    assert loads(stage.step()) == []
    stage.leave("runs1")
    assert loads(stage.step()) == []
    assert residents(stage) == {2, 3}, "the slot of the first has closed"
    assert stage.why("large") == "its adapter is not in a slot"

    stage.leave("runs3")
    plan = stage.step()
    assert [(load.adapter_id, load.pages) for load in plan.loads] == [(4, (0, 1, 4, 5))]
    stage.arrive(4)
    assert seated(stage.step()) == ["large"]


def test_a_resident_of_a_closed_slot_does_not_come_back_before_the_adapter_that_waited():
    stage = crowded()
    stage.ask("large", adapter=4)
    stage.leave("runs1")
    stage.step(at=1.0)
    stage.ask("again", adapter=1)
    stage.leave("runs2")

    assert loads(stage.step()) == [4]


def test_under_drain_as_many_residents_drain_at_once_as_must_leave():
    stage = crowded(DRAIN)
    stage.ask("large", adapter=4)
    stage.step(at=1.0)
    draining = stage.scheduler._turns._policy.draining_for
    assert [*draining.values()] == [4, 4]
    for adapter in draining:
        stage.leave(f"runs{adapter}")

    assert loads(stage.step(at=1.1)) == [4]
    assert residents(stage) == {4, *{1, 2, 3} - {*draining}}


@pytest.mark.parametrize("policy", [DRAIN, ROTATE], ids=["drain", "rotate"])
def test_it_comes_though_the_residents_have_new_prompts_in_every_step(policy):
    stage = crowded(policy, rows=32)
    stage.ask("large", adapter=4, max_new_tokens=2)
    for number in range(600):
        for adapter in (1, 2, 3):
            if f"more{adapter}-{number - 9}" not in stage.scheduler.refusals():
                stage.ask(f"more{adapter}-{number}", adapter, max_new_tokens=5)
        stage.arrive(*loads(stage.step(at=stage.now + 0.02)))
        if any(event.request_id == "large" for event in stage.said(Finished)):
            return
    pytest.fail("it waited for ever")


def test_under_rotate_residents_step_aside_one_by_one_and_it_comes():
    stage = crowded(ROTATE)
    stage.ask("large", adapter=4, max_new_tokens=2)
    assert loads(stage.step(at=0.01)) == []
    assert len(residents(stage)) == 2, "one has left, and its slot is closed"
    plan = stage.step(at=0.02)
    assert 4 in loads(plan)
    assert len(residents(stage)) == 2, "with it only one of the others fits"
    for _ in range(60):
        stage.arrive(*loads(plan))
        plan = stage.step(at=stage.now + 0.01)
    assert [event.request_id for event in stage.said(Finished)] == ["large"]


@pytest.mark.parametrize("is_unloaded", [True, False])
def test_slots_open_again_when_nobody_asks_for_it_any_more(is_unloaded):
    stage = crowded()
    stage.leave("runs1")
    stage.ask("large", adapter=4)
    stage.step()
    stage.ask("again", adapter=1)
    assert loads(stage.step()) == [], "two slots are open, and both are in use"

    stage.leave("large")
    if is_unloaded:
        stage.unload(4)
    assert loads(stage.step()) == [1]
    assert inspected(stage).slots == 3


# ── who is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_adapter_that_takes_more_than_all_pages_is_refused_with_the_numbers():
    stage = Stage(0, slots=3, pages=6)
    stage.tell(add_adapter(1))
    stage.step()
    stage.read(1, pages=7)
    plan = stage.step()

    (refused,) = stage.said(AdapterRefused)
    assert refused.reason.startswith("Adapter 'adapter1' takes 7 pages of eight ranks, but the slots share 6; start")
    assert plan.drops == (1,), "it is not kept in host memory"
    assert inspected(stage).slots == 3
    stage.tell(add_adapter(1))
    stage.step()
    stage.read(1, pages=6)
    stage.step()
    assert len(stage.said(AdapterAdded)) == 1


def test_one_slot_stays_open_beside_those_of_pinned_adapters():
    stage = Stage(2, sizes=(1, 1), slots=3, pages=6, pinned=(1, 2))
    stage.step()
    stage.said(AdapterAdded)
    for number, pages in ((3, 5), (4, 4)):
        stage.tell(add_adapter(number))
        stage.step()
        stage.read(number, pages)
        stage.step()

    (refused,) = stage.said(AdapterRefused)
    assert refused.adapter_id == 3
    assert (
        "takes 5 pages of eight ranks: with it 2 of 3 slots could be open, but 3 must be, 2 of them" in refused.reason
    )
    assert [event.adapter_id for event in stage.said(AdapterAdded)] == [4]
    assert inspected(stage).slots == 3


def test_no_more_are_pinned_than_open_slots_allow():
    stage = crowded()
    stage.tell(add_adapter(5, is_pinned=True))
    stage.tell(add_adapter(6, is_pinned=True))
    stage.step()

    (refused,) = stage.said(AdapterRefused)
    assert refused.adapter_id == 6
    assert "of 2 open slots at most 1 may be pinned" in refused.reason


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_an_adapter_that_was_to_be_read_later_is_refused_then_and_its_requests_fail_with_the_reason(is_asked_for):
    stage = Stage(0, slots=2, pages=6, lora=LoraConfig(max_loras_per_batch=2))
    stage.tell(replace(add_adapter(1), is_read_later=True))
    stage.step()
    if is_asked_for:
        stage.ask("asks", adapter=1)
    stage.step()
    stage.read(1, pages=7)
    plan = stage.step()

    (refused,) = stage.said(AdapterRefused)
    assert "takes 7 pages of eight ranks" in refused.reason
    assert plan.drops == (AdapterId(1),)
    finished = stage.said(Finished)
    assert len(finished) == is_asked_for
    for event in finished:
        assert (event.reason, event.fault.code, event.fault.message) == (
            FinishReason.FAILED,
            FaultCode.ADAPTER_FAILED,
            refused.reason,
        )


def test_a_known_adapter_whose_folder_has_become_too_large_fails_its_requests_and_keeps_no_slot_closed():
    lora = LoraConfig(max_loaded_loras=1)
    stage = Stage(0, slots=2, pages=4, lora=lora)
    for number in (1, 2):
        stage.tell(add_adapter(number))
        stage.step()
        stage.read(number, pages=2)
    stage.ask("asks", adapter=1)
    assert [one.adapter_id for one in stage.step().fetches] == [1]
    stage.read(1, pages=9)

    assert "takes 9 pages" in next(event.fault.message for event in _after(stage, Finished))
    assert inspected(stage).slots == 2


def _after(stage: Stage, kind: type) -> list:
    stage.step()
    return stage.said(kind)
