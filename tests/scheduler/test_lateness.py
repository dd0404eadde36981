from __future__ import annotations

from dataclasses import replace

import pytest

from rota.core.ids import AdapterId
from rota.core.tenant import Tenant
from rota.scheduler.scheduler import LATE_HEAD_START_S
from tests.builders import request
from tests.scheduler.stage import Stage, seated


def ask(stage: Stage, id: str, at: float, first_token_s: float | None = None, adapter: int = 0, **fields) -> None:
    asked = request(id, arrived_at=at, adapter=AdapterId(adapter), **fields)
    stage.tell(replace(asked, first_token_s=first_token_s))


@pytest.mark.parametrize(
    ("first_token_s", "came_at", "first"),
    [
        (None, 1.0, "patient"),
        (5.0, 1.0, "patient"),  # not late yet
        (0.5, 1.0, "hasty"),
        (1.0, 1.0, "hasty"),  # late from that moment on
        (0.5, LATE_HEAD_START_S - 1.0, "hasty"),
        (0.5, LATE_HEAD_START_S + 1.0, "patient"),  # the head start is bounded
    ],
)
def test_a_request_that_is_late_for_its_first_token_goes_before_others_of_its_tenant(first_token_s, came_at, first):
    stage = Stage(adapters=0, rows=1)
    ask(stage, "patient", at=0.0)
    ask(stage, "hasty", at=came_at, first_token_s=first_token_s)

    assert seated(stage.step(at=came_at + 1.0)) == [first]


def test_lateness_counts_across_the_adapters_of_a_tenant():
    stage = Stage(adapters=2, slots=2, rows=2)
    stage.seat(1, 2)
    ask(stage, "patient", at=0.0, adapter=1)
    ask(stage, "hasty", at=1.0, adapter=2, first_token_s=0.5)
    stage.leave("runs1")

    assert seated(stage.step(at=2.0)) == ["hasty"]


def test_being_late_takes_no_turn_of_another_tenant():
    stage = Stage(adapters=0, rows=2)
    served, other = Tenant(name="served"), Tenant(name="other")
    ask(stage, "before", at=0.0, tenant=served)
    stage.step(at=0.5)
    ask(stage, "hasty", at=0.5, first_token_s=0.1, tenant=served)
    ask(stage, "patient", at=0.6, tenant=other)
    ask(stage, "patient too", at=0.6, tenant=served)

    assert seated(stage.step(at=1.0)) == ["patient"]


def test_of_two_late_ones_the_earlier_goes_first():
    stage = Stage(adapters=0, rows=1)
    ask(stage, "second", at=1.0, first_token_s=0.1)
    ask(stage, "first", at=0.5, first_token_s=1.0)

    assert seated(stage.step(at=3.0)) == ["first"]


def test_requests_that_have_ended_are_forgotten_long_before_they_would_be_late():
    stage = Stage(adapters=0)
    for number in range(500):
        ask(stage, f"r{number}", at=0.0, first_token_s=1e9)
        stage.leave(f"r{number}")

    assert len(stage.scheduler._state.punctual._heap) < 100
