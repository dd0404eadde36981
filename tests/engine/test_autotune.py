"""What a start has timed is not timed again on the same machine, and it tells what took how long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from rota.core.stages import Choice, Stage
from rota.engine.autotune import AutotuneCache, StageRecorder, chosen


def anything(_: Choice) -> bool:
    return True


def asked(choice: Choice, fits: Callable[[Choice], bool] = anything) -> tuple[Choice, bool]:
    """What is chosen for one name, and whether it was found now."""
    found: list[Choice] = []

    def find() -> Choice:
        found.append(choice)
        return choice

    return chosen("threads", find, fits), bool(found)


def used(*before: AutotuneCache, machine: str = "here") -> tuple[AutotuneCache, AbstractContextManager[None]]:
    autotuned = AutotuneCache([result for one in before for result in one.made], machine)
    return autotuned, autotuned.in_use()


def test_a_second_start_knows_what_the_first_has_found():
    first, in_use = used()
    with in_use:
        assert asked((4,)) == ((4,), True)
        assert asked((5,)) == ((4,), False)

    second, in_use = used(first)
    with in_use:
        assert asked((5,)) == ((4,), False)
    assert second.made == first.made


def test_what_does_not_fit_any_more_is_found_again():
    first, in_use = used()
    with in_use:
        asked((4,))

    second, in_use = used(first)
    with in_use:
        assert asked((2,), lambda choice: choice in ((1,), (2,))) == ((2,), True)
    assert [result.choice for result in second.made] == [(2,)]


def test_another_machine_finds_for_itself():
    first, in_use = used()
    with in_use:
        asked((4,))

    _, in_use = used(first, machine="there")
    with in_use:
        assert asked((5,)) == ((5,), True)


def test_without_trials_everything_is_found_anew():
    _, in_use = used()
    with in_use:
        asked((4,))

    assert [asked((choice,)) for choice in (5, 6)] == [((5,), True), ((6,), True)]


# A recorder tells what took how long, counted from the beginning of the process.


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def test_blocks_are_stages_also_inside_one_another():
    clock = Clock()
    stage = StageRecorder(began_at=8.0, clock=clock)
    stage.note_past("imports")
    with stage("weights"):
        clock.now += 1.0
        with stage("kernels"):
            clock.now += 2.0

    assert stage.stages == (Stage("imports", 0.0, 2.0), Stage("kernels", 3.0, 2.0), Stage("weights", 2.0, 3.0))


def test_a_block_that_fails_is_no_stage():
    stage = StageRecorder()

    def fail() -> None:
        with stage("weights"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert stage.stages == ()


def test_a_stage_is_told_as_it_begins_unless_it_runs_beside_another(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rota"), "propagate", True)
    stage = StageRecorder()

    def run_beside() -> None:
        with stage("kernels"):
            pass

    with caplog.at_level(logging.INFO, "rota.start"), stage("weights"):
        assert caplog.messages == ["Starting: weights."]
        beside = threading.Thread(target=run_beside)
        beside.start()
        beside.join()
    assert caplog.messages == ["Starting: weights."]
    assert {one.name for one in stage.stages} == {"kernels", "weights"}
