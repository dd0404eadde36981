from __future__ import annotations

from typing import Any

import pytest

from rota.core.errors import EngineDiedError
from rota.core.plan import StepPlan
from rota.runtime.ranks.lead import Agreement, Leader
from tests.fakes import FakeDevice, FakeTicket


class Interrupted(FakeDevice):
    """Ctrl-C comes during its second step."""

    def submit(self, plan: StepPlan) -> FakeTicket:
        if plan.step_id == 2:
            raise KeyboardInterrupt
        return super().submit(plan)


class Lines:
    """A meeting and a listener: followers get every plan, and none is lost."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send_plan(self, plan: StepPlan) -> None:
        self.sent.append(plan.step_id)

    def check(self, wait_s: float = 0.0) -> None:
        pass


def test_after_a_step_that_the_followers_have_made_alone_the_leader_refuses_the_next():
    device, lines = Interrupted(), Lines()
    typed: Any = lines
    leader = Leader(device, device.capacity, typed, Agreement(range(2)), typed, lambda: None)
    leader.collect(leader.submit(StepPlan(step_id=1)))
    with pytest.raises(KeyboardInterrupt):
        leader.submit(StepPlan(step_id=2))

    with pytest.raises(EngineDiedError, match="start all ranks again"):
        leader.submit(StepPlan(step_id=3))
    assert lines.sent == [1, 2]
