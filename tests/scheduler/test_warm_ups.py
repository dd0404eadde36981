"""A new version comes into a slot before its name means it, and takes nothing that another adapter wants."""

from __future__ import annotations

from dataclasses import replace

from rota.core.config import LoraConfig
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, SlotChanged, SlotReason, SlotState
from rota.core.ids import AdapterId
from rota.core.messages import Pause
from rota.core.plan import StepPlan
from tests.builders import add_adapter
from tests.scheduler.stage import Stage, loads, seated


def renew(stage: Stage, new: int, former: int, **fields: bool) -> None:
    """A version of the same name is added, and read."""
    stage.tell(replace(add_adapter(new, name=f"adapter{former}", **fields), former=AdapterId(former)))
    assert [adapter.adapter_id for adapter in stage.step().fetches] == [new]
    stage.said(AdapterAdded)
    stage.read(new)


def added(stage: Stage) -> list[int]:
    return [event.adapter_id for event in stage.said(AdapterAdded)]


def used(stage: Stage, *adapters: int) -> None:
    """These lie in slots, and their requests have ended."""
    stage.seat(*adapters)
    for adapter in adapters:
        stage.leave(f"runs{adapter}")
    stage.step()


def slots_of(plan: StepPlan) -> dict[int, int]:
    return {load.adapter_id: load.slot for load in plan.loads}


def test_a_version_is_copied_into_an_empty_slot_while_the_old_one_serves_and_counts_as_added_then():
    stage = Stage(adapters=1, slots=2)
    stage.seat(1)
    renew(stage, 2, former=1)

    plan = stage.step()
    assert slots_of(plan) == {2: 1}
    assert plan.decodes, "the old version serves on"
    assert added(stage) == []
    stage.arrive(2)
    assert stage.step().decodes
    assert added(stage) == [2]
    stage.ask("first", adapter=2)
    assert seated(stage.step()) == ["first"], "its first request waits for no copy"


def test_it_takes_the_place_of_the_old_version_if_no_other_slot_is_empty_and_nobody_uses_that():
    stage = Stage(adapters=2, slots=2)
    used(stage, 1, 2)
    renew(stage, 3, former=2)

    assert slots_of(stage.step()) == {3: 1}
    (gone,) = [event for event in stage.said(SlotChanged) if event.state is SlotState.EMPTY]
    assert (gone.adapter_id, gone.reason) == (2, SlotReason.IDLE)


def test_if_the_old_version_answers_an_adapter_without_requests_makes_room():
    stage = Stage(adapters=2, slots=2)
    used(stage, 1)
    stage.seat(2)
    renew(stage, 3, former=2)

    plan = stage.step()
    assert slots_of(plan) == {3: 0}
    assert plan.decodes


def test_without_room_it_counts_as_added_from_host_memory():
    stage = Stage(adapters=2, slots=2)
    stage.seat(1, 2)
    renew(stage, 3, former=2)

    assert loads(stage.step()) == []
    assert added(stage) == [3]


def test_an_empty_slot_stays_empty_for_an_adapter_that_is_being_read_for_a_request():
    stage = Stage(adapters=1, slots=2)
    stage.seat(1)
    stage.tell(replace(add_adapter(2), is_read_later=True))
    stage.step()
    stage.ask("waits", adapter=2)
    renew(stage, 3, former=1)

    assert loads(stage.step()) == []
    assert added(stage) == [3]
    stage.read(2)
    assert loads(stage.step()) == [2]


def test_during_a_pause_it_is_copied_too():
    stage = Stage(adapters=1, slots=2)
    stage.seat(1)
    stage.tell(Pause(stage.now))
    stage.step()
    renew(stage, 2, former=1)

    assert loads(stage.step()) == [2]
    stage.arrive(2)
    stage.step()
    assert added(stage) == [2]


def test_copies_for_versions_are_made_one_after_the_other():
    stage = Stage(adapters=2, slots=4)
    stage.seat(1, 2)
    for new, former in ((3, 1), (4, 2)):
        stage.tell(replace(add_adapter(new), former=AdapterId(former)))
    stage.step()
    stage.said(AdapterAdded)
    stage.read(3)
    stage.read(4)

    assert loads(stage.step()) == [3]
    assert loads(stage.step()) == []
    stage.arrive(3)
    assert loads(stage.step()) == [4]
    stage.arrive(4)
    stage.step()
    assert added(stage) == [3, 4]


def test_a_copy_that_fails_refuses_the_version_and_leaves_nothing_of_it():
    stage = Stage(adapters=1, slots=2)
    stage.seat(1)
    renew(stage, 2, former=1)
    stage.step()
    stage.fail(2, "The device refused the copy.")
    plan = stage.step()

    assert [event.reason for event in stage.said(AdapterRefused)] == ["The device refused the copy."]
    assert plan.drops == (2,)
    assert plan.decodes, "the old version serves on"
    renew(stage, 3, former=1)
    assert slots_of(stage.step()) == {3: 1}, "the slot is empty again"


def test_one_that_is_unloaded_during_its_copy_leaves_behind_the_copy():
    stage = Stage(adapters=1, slots=2)
    renew(stage, 2, former=1)
    stage.step()
    stage.unload(2)
    stage.step()
    assert stage.said(AdapterRemoved) == []

    stage.arrive(2)
    stage.step()
    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [2]


def test_one_that_is_unloaded_before_its_copy_is_not_copied():
    stage = Stage(adapters=1, slots=2)
    renew(stage, 2, former=1)
    stage.unload(2)

    assert loads(stage.step()) == []
    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [2]


def test_a_version_of_a_pinned_adapter_is_copied_beside_it_and_takes_over_its_pin():
    stage = Stage(adapters=2, slots=2, pinned=(1,))
    stage.step()
    stage.arrive(1)
    renew(stage, 3, former=1, is_pinned=True)

    assert loads(stage.step()) == [3]
    stage.arrive(3)
    stage.step()
    assert added(stage) == [3]
    stage.unload(1)
    stage.ask("other", adapter=2)
    assert loads(stage.step()) == [2]


def test_without_overlap_the_step_with_the_copy_answers_at_once():
    stage = Stage(adapters=1, slots=2, lora=LoraConfig(max_loras_per_batch=2, enable_lora_overlap_loading=False))
    stage.ask("runs1", adapter=1, max_new_tokens=40)
    stage.step()
    renew(stage, 2, former=1)

    (load,) = stage.step().loads
    assert load.is_awaited
    assert added(stage) == [2]


def test_a_hundred_versions_leave_nothing_in_the_books():
    stage = Stage(adapters=1, slots=2)
    stage.seat(1)
    used_before = len(stage.scheduler._state.groups)
    for new in range(2, 102):
        renew(stage, new, former=new - 1)
        stage.step()
        stage.arrive(new)
        if new > 2:
            stage.unload(new - 1)
        stage.step()

    assert len(stage.scheduler._state.groups) == used_before + 1
    assert stage.scheduler._state.hosts.known == 2


def test_a_version_that_requests_wait_for_comes_into_a_slot_as_soon_as_it_is_read():
    stage = Stage(adapters=2, slots=1)
    stage.seat(1)
    stage.leave("runs1")
    stage.tell(replace(add_adapter(3, name="adapter2"), former=AdapterId(2)))
    stage.step()
    stage.ask("early", adapter=3)
    stage.step()
    stage.read(3)

    assert loads(stage.step()) == [3]


def test_requests_for_a_version_that_gets_no_slot_at_once_are_looked_at_again_at_once():
    """Its client is answered behind the turns of the pass: nothing else might wake the loop."""
    stage = Stage(adapters=2, slots=1)
    stage.seat(1)
    renew(stage, 3, former=2)

    assert stage.step(at=5.0).wake_at == 5.0
    assert added(stage) == [3]
