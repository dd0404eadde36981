"""Compiling runs beside the reading of weights, and nothing it does can spoil that."""

from __future__ import annotations

import threading

import pytest
import torch

from rota.core.errors import ModelError
from rota.engine.build import precompiled
from rota.engine.step.frames import PromptRoom
from tests.waiting import TIMEOUT_S

PROMPTS = PromptRoom(512)


class Compiling:
    """Notes what was compiled once it may; raises what it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_go_on = threading.Event()
        self.compiled: list[PromptRoom] = []
        self.is_closed = False
        self._error = error

    def precompile(self, prompts: PromptRoom) -> None:
        assert self.may_go_on.wait(TIMEOUT_S)
        if self._error:
            raise self._error
        self.compiled.append(prompts)

    def close(self) -> None:
        self.is_closed = True


def test_it_runs_beside_the_body_and_is_over_when_that_ends():
    engine = Compiling()
    with precompiled(lambda: engine, PROMPTS):
        assert engine.compiled == []
        engine.may_go_on.set()
    assert engine.compiled == [PROMPTS]
    assert engine.is_closed


def test_a_device_without_room_for_it_goes_without():
    engine = Compiling(torch.OutOfMemoryError("full"))
    with precompiled(lambda: engine, PROMPTS):
        engine.may_go_on.set()
    assert engine.compiled == []


def test_what_else_goes_wrong_is_told():
    engine = Compiling(RuntimeError("a kernel does not compile"))
    with pytest.raises(RuntimeError, match="does not compile"), precompiled(lambda: engine, PROMPTS):
        engine.may_go_on.set()


def test_weights_that_cannot_be_read_are_what_is_told_first():
    engine = Compiling(RuntimeError("a kernel does not compile"))

    def read_weights() -> None:
        with precompiled(lambda: engine, PROMPTS):
            engine.may_go_on.set()
            raise ModelError("There are no weights.")

    with pytest.raises(ModelError, match="no weights"):
        read_weights()
