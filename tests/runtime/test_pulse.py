from __future__ import annotations

import pytest

from rota.runtime.live import LiveWorld, ThreadInbox
from rota.runtime.pulse import BEAT_S, Pulse
from tests.fakes import FakeDevice


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told() -> list[float]:
    return []


def test_a_loop_that_goes_round_quickly_beats_now_and_then(clock, told):
    pulse = Pulse(told.append, clock=clock)
    for _ in range(101):
        pulse.beat()
        clock.now += BEAT_S / 50

    assert told == [0.0] * 3


def test_a_beat_says_how_long_the_longest_step_took(clock, told):
    pulse = Pulse(told.append, clock=clock)
    for seconds in (2.0, 7.0, 1.0):
        pulse.step_begins(1)
        clock.now += seconds
        pulse.step_ended()
    pulse.beat()

    assert told[-1] == 7.0


def test_of_two_steps_in_flight_each_is_timed_from_the_end_of_the_step_before(clock, told):
    pulse = Pulse(told.append, clock=clock)
    for _ in range(2):
        pulse.step_begins(1)
    for _ in range(2):
        clock.now += 3.0
        pulse.step_ended()
    pulse.beat()

    assert told[-1] == 3.0


def test_a_long_step_is_told_before_it_begins_and_only_while_it_is_in_flight(clock, told):
    pulse = Pulse(told.append, token_s=0.01, clock=clock)
    pulse.beat()
    pulse.step_begins(2000)
    assert told == [0.0, 20.0]

    clock.now += 4.0
    pulse.step_ended()
    pulse.beat()
    assert told == [0.0, 20.0, 4.0]


def test_short_steps_are_not_told_one_by_one(clock, told):
    pulse = Pulse(told.append, token_s=0.001, clock=clock)
    for tokens in range(1, 100):
        pulse.step_begins(tokens)
        pulse.step_ended()

    assert told == []


def test_a_world_beats_while_it_waits_and_gives_no_empty_messages_early(told):
    world = LiveWorld(FakeDevice(), ThreadInbox(), Pulse(told.append))
    until = world.now() + 2.5 * BEAT_S

    assert world.receive(until) == []
    assert world.now() >= until
    assert len(told) >= 2
