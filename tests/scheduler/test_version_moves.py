"""Requests of one version of an adapter go on under another, from their next token on."""

from __future__ import annotations

import pytest

from rota.core.events import AdapterRemoved, Finished, FinishReason, Moved
from rota.core.ids import AdapterId
from rota.core.messages import MoveRequests, RemoveAdapter
from tests.scheduler.stage import Stage

OLD, NEW = AdapterId(1), AdapterId(2)


def move(stage: Stage, keeps_kv: bool = False) -> None:
    stage.tell(MoveRequests(old=OLD, new=NEW, at=stage.now, keeps_kv=keeps_kv))
    stage.tell(RemoveAdapter(adapter_id=OLD, at=stage.now, takes_requests=True))


def run_out(stage: Stage) -> None:
    while not stage.scheduler.is_idle:
        stage.step()
        stage.arrive(NEW)


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_a_running_answer_goes_on_under_the_new_version_and_says_from_which_token_on(keeps_kv):
    stage = Stage(rows=4)
    stage.seat(1, max_new_tokens=8)
    stage.step()
    stage.step()
    move(stage, keeps_kv)
    run_out(stage)

    (moved,) = stage.said(Moved)
    assert (moved.old, moved.new, moved.output_tokens, moved.kept_kv) == (OLD, NEW, 3, keeps_kv)
    assert [(end.reason, end.output_tokens) for end in stage.said(Finished)] == [(FinishReason.LENGTH, 8)]
    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [OLD]


def test_a_version_that_is_to_leave_is_gone_as_soon_as_its_requests_have_moved():
    stage = Stage(rows=4)
    stage.seat(1)
    stage.tell(RemoveAdapter(adapter_id=OLD, at=stage.now, takes_requests=True))
    stage.step()
    assert stage.said(AdapterRemoved) == []
    stage.tell(MoveRequests(old=OLD, new=NEW, at=stage.now))
    stage.step()

    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [OLD]


@pytest.mark.parametrize(("keeps_kv", "computed"), [(False, 0), (True, 22)])
def test_its_kv_is_computed_again_or_kept_as_asked(keeps_kv, computed):
    stage = Stage(rows=4)
    stage.seat(1, prompt=20, max_new_tokens=8)
    stage.step()
    stage.step()
    move(stage, keeps_kv)
    stage.step()
    stage.arrive(NEW)
    plan = stage.step()

    (seat,) = plan.seats
    assert (seat.adapter_id, seat.computed, len(seat.tokens)) == (NEW, computed, 23)
    assert [chunk.length for chunk in plan.chunks] == ([] if keeps_kv else [23])
    assert len(plan.decodes) == (1 if keeps_kv else 0)


def test_a_token_in_flight_is_still_the_old_versions():
    stage = Stage(rows=4)
    stage.seat(1, max_new_tokens=8)
    plan = stage.scheduler.plan(stage.now)
    move(stage)
    after = stage.scheduler.plan(stage.now)
    assert not after.seats
    stage.finish(plan)
    stage.finish(after)
    run_out(stage)

    assert [moved.output_tokens for moved in stage.said(Moved)] == [2]
    assert [end.output_tokens for end in stage.said(Finished)] == [8]


def test_a_request_that_waits_is_the_new_versions_from_its_first_token_on():
    stage = Stage(rows=1)
    stage.seat(1, max_new_tokens=3)
    stage.ask("waits", adapter=1, max_new_tokens=3)
    move(stage)
    run_out(stage)

    assert {moved.request_id: moved.output_tokens for moved in stage.said(Moved)} == {"runs1": 1, "waits": 0}


@pytest.mark.parametrize("new", [AdapterId(9), OLD])
def test_nothing_moves_to_a_version_that_is_not_there(new):
    stage = Stage(rows=4)
    stage.seat(1, max_new_tokens=3)
    stage.tell(RemoveAdapter(adapter_id=OLD, at=stage.now, takes_requests=True))
    stage.tell(MoveRequests(old=OLD, new=new, at=stage.now))
    run_out(stage)
    assert stage.said(Moved) == []
    assert [end.reason for end in stage.said(Finished)] == [FinishReason.LENGTH]


@pytest.mark.parametrize(("keeps_kv", "cached"), [(False, 48), (True, 0)])
def test_kv_of_two_versions_is_found_by_nobody(keeps_kv, cached):
    prompt = tuple(range(3, 18))
    stage = Stage(rows=4)
    stage.seat(1, prompt=prompt, max_new_tokens=40)
    stage.step()
    move(stage, keeps_kv)
    run_out(stage)
    stage.said(Finished)
    stage.ask("again", adapter=2, prompt=prompt + (7,) * 40, max_new_tokens=1)
    run_out(stage)
    assert [end.cached_tokens for end in stage.said(Finished)] == [cached]
