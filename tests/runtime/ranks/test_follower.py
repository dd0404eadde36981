"""A follower against a leader that the test plays itself, plan by plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from rota.core.errors import EngineDiedError
from rota.core.plan import StepPlan, StepResult
from rota.runtime.heartbeat import Heartbeat
from rota.runtime.ranks.follower import LEADERLESS, replay, watch_leader
from rota.runtime.ranks.meeting import CODEC, Numbered, open_line
from rota.runtime.wire import Stop
from tests.fakes import FakeDevice, FakeTicket
from tests.waiting import TIMEOUT_S, until


class Noted(FakeDevice):
    """Writes down what it does: s1 is the submit of step 1, c1 its collect."""

    def __init__(self) -> None:
        super().__init__()
        self.deeds: list[str] = []

    def submit(self, plan: StepPlan) -> FakeTicket:
        self.deeds.append(f"s{plan.step_id}")
        return super().submit(plan)

    def collect(self, ticket: FakeTicket) -> StepResult:
        self.deeds.append(f"c{ticket.step_id}")
        return super().collect(ticket)


class Stage:
    """A follower's loop in a thread, and the leader's end of its line."""

    def __init__(self, depth: int) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.leader = open_line(self.context, zmq.PAIR)
        port = self.leader.bind_to_random_port("tcp://127.0.0.1")
        self.plans = open_line(self.context, zmq.PAIR)
        self.plans.connect(f"tcp://127.0.0.1:{port}")
        self.device, self.beats, self.lost = Noted(), list[float](), threading.Event()
        self.error: Exception | None = None
        self.ended: list[int] = []
        self._depth = depth
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.begin = self._thread.start

    def _follow(self) -> None:
        try:
            replay(self.device, self.plans, Heartbeat(self.beats.append), self._depth, self.lost.is_set)
        except (EngineDiedError, zmq.ZMQError) as error:
            self.error = error

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.leader.send(CODEC.encode([Numbered(number, StepPlan(step_id=number))]))

    def lose_leader(self) -> None:
        """Close the leader's end once it has sent all; returns when the follower's end has noticed."""
        watch_leader(self.plans, self.lost, threading.Event(), self.ended.append, last_word_s=TIMEOUT_S)
        self.leader.close(linger=int(TIMEOUT_S * 1000.0))
        assert until(self.lost.is_set)

    def stop(self) -> None:
        self.leader.send(CODEC.encode([Stop()]))
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@pytest.fixture(params=[1, 2])
def stage(request) -> Iterator[Stage]:
    stage = Stage(request.param)
    yield stage
    stage.context.destroy(linger=0)


def test_a_follower_has_as_many_steps_in_flight_as_its_leader_may_have(stage):
    depth = stage._depth
    stage.send(1, 2, 3, 4, 5)
    stage.begin()  # with all plans there: a follower that has to wait for one takes its leader for idle
    stage.stop()

    submitted = [deed for deed in stage.device.deeds if deed.startswith("s")]
    assert submitted == ["s1", "s2", "s3", "s4", "s5"]
    # The first collect comes behind the submit that makes one step more than `depth`.
    assert stage.device.deeds.index("c1") == depth + 1


def test_a_follower_without_plans_collects_all_and_says_that_it_is_alive(stage):
    stage.begin()
    stage.send(1, 2)

    assert until(lambda: stage.device.deeds[-1:] == ["c2"])
    beats = len(stage.beats)
    assert until(lambda: len(stage.beats) > beats)
    stage.send(3)
    stage.stop()
    assert stage.device.deeds[-1] == "s3"


@pytest.mark.parametrize(
    ("numbers", "sentence"), [((1, 2, 4), "Plan 3 is missing: plan 4 came"), ((2,), "Plan 1 is missing")]
)
def test_a_follower_that_missed_a_plan_is_lost(stage, numbers, sentence):
    stage.begin()
    stage.send(*numbers)

    assert until(lambda: stage.error is not None)
    assert sentence in str(stage.error)
    assert f"s{numbers[-1]}" not in stage.device.deeds


def test_a_follower_whose_leader_is_lost_carries_out_what_came_before_and_ends(stage):
    stage.send(1, 2)
    stage.lose_leader()
    stage.begin()

    assert until(lambda: stage.error is not None)
    assert str(stage.error) == "Rank 0 is gone."
    assert "s2" in stage.device.deeds


def test_a_slow_follower_still_hears_the_last_word_of_a_leader_that_is_gone(stage):
    stage.send(1)
    stage.leader.send(CODEC.encode([Stop()]))
    stage.lose_leader()
    stage.begin()

    assert until(lambda: not stage._thread.is_alive())
    assert stage.error is None


@pytest.mark.parametrize("is_over", [False, True])
def test_a_follower_whose_leader_is_gone_ends_unless_it_was_told_to(is_over):
    context: zmq.Context[Any] = zmq.Context()
    leader = open_line(context, zmq.ROUTER)
    port = leader.bind_to_random_port("tcp://127.0.0.1")
    plans = open_line(context, zmq.DEALER)
    lost, told, codes = threading.Event(), threading.Event(), list[int]()
    watch_leader(plans, lost, told, codes.append, last_word_s=0.5)
    plans.connect(f"tcp://127.0.0.1:{port}")
    plans.send(b"hello")
    assert leader.poll(int(TIMEOUT_S * 1000))
    if is_over:
        told.set()
    leader.close()

    # Time is what is tested: a follower that was told to stop is left alone for as long as another needs to end.
    assert until(lambda: codes == [LEADERLESS], 1.5 if is_over else TIMEOUT_S) == (not is_over)
    assert lost.is_set()
    context.destroy(linger=0)
