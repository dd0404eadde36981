"""Requests of a higher priority get rows and KV from those of a lower one, and only from those."""

from __future__ import annotations

from rota.core.events import Preempted
from rota.scheduler.preemption import PATIENCE_STEPS
from tests.scheduler.stage import Stage, seated


def full(priority: int = 0, **found) -> Stage:
    """Four requests run, and there is a row or KV for no other one."""
    stage = Stage(**{"rows": 4, **found})
    for number in range(4):
        stage.ask(f"r{number}", prompt=16, max_new_tokens=40, at=0.1 * number, priority=priority)
    stage.step(at=1.0)
    return stage


def preempted(stage: Stage) -> list[str]:
    return [event.request_id for event in stage.said(Preempted)]


def test_an_urgent_request_takes_the_row_of_the_newest():
    stage = full()
    stage.ask("urgent", priority=1)

    assert seated(stage.step()) == ["urgent"]
    assert preempted(stage) == ["r3"]
    for _ in range(3):
        stage.step()
    assert preempted(stage) == [], "one is enough"


def test_a_pass_that_preempts_asks_to_be_called_again_at_once():
    """If the urgent request does not start after all, nothing else might wake the loop."""
    stage = full()
    stage.ask("urgent", priority=1)

    assert stage.step(at=2.0).wake_at == 2.0
    assert preempted(stage) == ["r3"]


def test_a_row_that_becomes_free_within_a_few_steps_is_waited_for():
    stage = full()
    stage.scheduler._state.step_s = 0.01
    stage.ask("urgent", priority=1)
    assert seated(stage.step(at=1.0 + 0.01 * (PATIENCE_STEPS - 1))) == []
    assert stage.why("urgent") == "as many requests run as may run"

    assert seated(stage.step(at=1.0 + 0.01 * (PATIENCE_STEPS + 1))) == ["urgent"]


def test_the_lowest_priority_yields_first():
    stage = Stage(rows=3)
    for id, priority in (("low", -1), ("middle", 0), ("newer", 0)):
        stage.ask(id, max_new_tokens=40, priority=priority)
        stage.step(at=stage.now + 0.1)
    stage.ask("urgent", priority=1)
    stage.step()

    assert preempted(stage) == ["low"]


def test_equal_priorities_take_nothing_from_each_other():
    stage = full(priority=1)
    stage.ask("urgent too", priority=1)
    stage.ask("patient", priority=0)

    assert seated(stage.step()) == []
    assert preempted(stage) == []


def test_an_urgent_request_takes_kv_as_far_as_it_needs():
    stage = full(rows=8, blocks=14)  # of 14 blocks those that run hold 4, need 4 more now, and keep one each in reserve
    stage.ask("urgent", prompt=80, priority=1)

    assert seated(stage.step()) == ["urgent"]
    assert preempted(stage) == ["r3"]


def test_no_request_is_preempted_in_vain():
    stage = full(rows=8, blocks=16, priority=1)
    stage.ask("low", prompt=1, max_new_tokens=14, priority=0)
    assert seated(stage.step()) == ["low"]
    stage.ask("urgent", prompt=230, priority=2)
    stage.step()
    assert len(preempted(stage)) == 5, "with all blocks it fits"

    stage = full(rows=8, blocks=16, priority=2)
    stage.ask("low", prompt=1, max_new_tokens=14, priority=0)
    stage.step()
    stage.ask("urgent", prompt=230, priority=2)
    stage.step()
    assert preempted(stage) == [], "the block of the only one that would yield is not enough"


def test_a_request_of_lower_priority_gives_up_its_kv_though_its_adapter_comes_first():
    """When the urgent sequence needs one more block, the base request is in the step already."""
    stage = Stage(rows=8, blocks=6, slots=1, block_size=16)
    stage.seat(1, prompt=30, max_new_tokens=60)
    stage.leave("runs1")
    stage.ask("urgent", adapter=1, prompt=30, max_new_tokens=60, priority=1)
    stage.ask("base", prompt=20, max_new_tokens=60)
    for _ in range(36):
        stage.step()

    assert "urgent" not in preempted(stage)


def test_nor_for_kv_of_which_a_block_is_kept_for_each_that_still_runs():
    """Free blocks and those of `low` are five, as many as `urgent` needs. But one of them is kept for `runs`."""
    stage = Stage(adapters=0, blocks=6)
    stage.ask("runs", prompt=4, max_new_tokens=40, priority=1)
    stage.ask("low", prompt=20, max_new_tokens=40, priority=0)
    assert len(seated(stage.step(at=1.0))) == 2
    stage.ask("urgent", prompt=5 * 16 - 4, priority=1)
    for _ in range(3):
        stage.step(at=stage.now + 1.0)

    assert preempted(stage) == []
