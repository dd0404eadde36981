"""An engine says that it lives and how long a step should take, and a front waits for it so long and no longer."""

from __future__ import annotations

import pytest

from rota.core.events import EngineRestarted
from rota.policy.step_times import StepTimes
from rota.runtime.heartbeat import BEAT_S, Heartbeat
from rota.runtime.in_process import ThreadInbox
from rota.runtime.live import LiveWorld
from rota.runtime.timeouts import KILL_S, LINGER_S, EngineTimeouts, Silence
from rota.runtime.wire import Alive, Building, Failed, Ready
from tests.builders import capacity
from tests.fakes import FakeDevice

# ── beats ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    heartbeat = Heartbeat(told.append, clock=clock)
    for _ in range(101):
        heartbeat.beat()
        clock.now += BEAT_S / 50

    assert told == [0.0] * 3


def steps(heartbeat: Heartbeat, clock: Clock, *seconds: float, prompt_tokens: int = 0) -> None:
    for each_s in seconds:
        heartbeat.step_begins(prompt_tokens)
        clock.now += each_s
        heartbeat.step_ended()


def test_a_step_should_take_as_long_as_recent_ones(clock, told):
    heartbeat = Heartbeat(told.append, clock=clock)
    steps(heartbeat, clock, 2.0, 7.0, 3.0)
    heartbeat.step_begins(0)
    heartbeat.beat()
    assert told[-1] == 3.0


def test_one_step_that_was_far_off_is_forgotten_and_two_are_not(clock, told):
    heartbeat = Heartbeat(told.append, clock=clock)
    steps(heartbeat, clock, 0.2, 0.2, 12.0)
    heartbeat.step_begins(0)
    heartbeat.beat()
    assert told[-1] == pytest.approx(0.2)

    clock.now += 12.0
    heartbeat.step_ended()
    heartbeat.step_begins(0)
    heartbeat.beat()
    assert told[-1] == 12.0


def test_a_loop_without_a_step_in_flight_expects_none_to_take_long(clock, told):
    heartbeat = Heartbeat(told.append, clock=clock)
    steps(heartbeat, clock, 7.0, 7.0)
    heartbeat.beat()

    assert told[-1] == 0.0


def test_of_two_steps_in_flight_each_is_timed_from_the_end_of_the_step_before(clock, told):
    heartbeat = Heartbeat(told.append, clock=clock)
    for _ in range(2):
        heartbeat.step_begins(0)
    for _ in range(2):
        clock.now += 3.0
        heartbeat.step_ended()
    heartbeat.step_begins(0)
    heartbeat.beat()

    assert told[-1] == 3.0


def test_a_device_that_computes_while_it_is_handed_a_step_says_itself_how_long_that_took(clock, told):
    heartbeat = Heartbeat(told.append, clock=clock)
    for _ in range(2):
        heartbeat.step_begins(0)
        clock.now += 3.0
    heartbeat.step_ended(3.0)
    heartbeat.step_begins(0)
    heartbeat.beat()

    assert told[-1] == 3.0


def test_a_long_step_is_told_before_it_begins_and_only_while_it_is_in_flight(clock, told):
    heartbeat = Heartbeat(told.append, StepTimes(0.5, 0.01), clock)
    heartbeat.beat()
    heartbeat.step_begins(2000)
    assert told == [0.0, 20.5]

    clock.now += 4.5
    heartbeat.step_ended()
    heartbeat.step_begins(0)
    assert told == [0.0, 20.5, 0.5], "a short step may be silent for no longer than others"

    heartbeat.step_begins(2000)
    assert told[-1] == pytest.approx(0.5 + 2000 * 0.002), "as long as the one before"


def test_short_steps_are_not_told_one_by_one(clock, told):
    heartbeat = Heartbeat(told.append, StepTimes(0.001, 0.001), clock)
    for tokens in range(1, 99):
        heartbeat.step_begins(tokens)
        heartbeat.step_ended()

    assert told == []


def test_a_world_beats_while_it_waits_and_gives_no_empty_messages_early(told):
    world = LiveWorld(FakeDevice(), ThreadInbox(), Heartbeat(told.append))
    until = world.now() + 2.5 * BEAT_S

    assert world.receive(until) == []
    assert world.now() >= until
    assert len(told) >= 2


# ── patience ──────────────────────────────────────────────────────────────────────────────────────────────────────────

READY = Ready(capacity())


def serving(silence_s: float = 20.0) -> Silence:
    silence = Silence(EngineTimeouts(silence_s=silence_s))
    silence.hear([READY])
    return silence


def test_an_engine_that_serves_may_be_silent_for_so_long_and_no_longer():
    silence = serving(silence_s=20.0)
    silence.spend(19.0)
    assert (silence.left_s, silence.complaint) == (1.0, "")
    silence.spend(1.0)
    assert silence.complaint == "The engine hung: it said nothing for 20 seconds."


@pytest.mark.parametrize("record", [Alive(0.1), EngineRestarted(at=0.0, reason="")], ids=["alive", "event"])
def test_every_word_begins_a_new_silence(record):
    silence = serving()
    silence.spend(19.0)
    silence.hear([record])

    assert silence.left_s == 20.0


@pytest.mark.parametrize(
    ("expected_s", "limit_s"), [(0.0, 20.0), (1.9, 20.0), (3.0, 30.0), (29.0, 290.0), (60.0, 300.0)]
)
def test_the_limit_is_ten_times_what_the_step_should_take_if_that_is_more_but_never_above_the_cap(expected_s, limit_s):
    silence = serving(silence_s=20.0)
    silence.hear([Alive(expected_s)])

    assert silence.left_s == limit_s


def test_a_floor_above_the_cap_counts():
    silence = serving(silence_s=400.0)
    silence.hear([Alive(100.0)])

    assert silence.left_s == 400.0


def test_a_step_that_was_expected_to_be_long_and_was_not_counts_no_more():
    silence = serving(silence_s=20.0)
    silence.hear([Alive(9.0)])
    silence.hear([Alive(0.5)])

    assert silence.left_s == 20.0


def test_a_start_goes_on_with_every_word_of_progress_until_its_ceiling():
    silence = Silence(EngineTimeouts(start_s=100.0, start_silence_s=30.0))
    for _ in range(4):
        silence.spend(24.0)
        silence.hear([Building("Loading")])
    assert (silence.left_s, silence.complaint) == (4.0, "")
    silence.spend(4.0)
    assert silence.complaint == "The engine was not ready after 100 seconds."


def test_a_start_without_progress_is_a_hang():
    silence = Silence(EngineTimeouts(start_s=100.0, start_silence_s=30.0))
    silence.spend(30.0)

    assert silence.complaint == "The engine hung: its start made no progress for 30 seconds."


def test_an_engine_that_has_said_its_last_words_has_a_moment_to_end():
    silence = Silence(EngineTimeouts())
    silence.hear([Failed("It broke.")])
    assert silence.left_s == LINGER_S

    silence.limit(KILL_S)
    assert silence.left_s == KILL_S
