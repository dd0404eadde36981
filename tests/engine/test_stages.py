"""A recorder tells what took how long, counted from the beginning of the process."""

from __future__ import annotations

import pytest

from rota.core.stages import Stage
from rota.engine.autotune import StageRecorder


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
