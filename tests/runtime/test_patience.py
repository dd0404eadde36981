from __future__ import annotations

import pytest

from rota.core.events import EngineRestarted
from rota.runtime.timeouts import KILL_S, LINGER_S, EngineTimeouts, Silence
from rota.runtime.wire import Alive, Building, Failed, Ready
from tests.builders import capacity

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
