"""An engine hears what its first adapters need while it is built, and each engine after it hears the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from rota.core.config import EngineConfig, FirstAdapters
from rota.core.errors import EngineDiedError
from rota.core.stages import Stage
from rota.runtime.service import BuildDevice, ServicePhase
from rota.runtime.supervisor import AdapterLook, SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from rota.start import START
from tests.builders import submit
from tests.fakes import FakeDevice
from tests.runtime.services import Listener
from tests.waiting import TIMEOUT_S, until

Looked = Future[FirstAdapters]


def build_told() -> FakeDevice:
    """A device that says in its stages what it was told."""
    told = START.wait_for_first()
    return FakeDevice(stages=(Stage("rank", float(told.rank), 1.0),))


@contextmanager
def serving(build_device: BuildDevice, first: Looked) -> Iterator[tuple[SupervisedService, Listener]]:
    timeouts = EngineTimeouts(quick_death_s=0.0)
    look = AdapterLook(first.result)
    service, listener = SupervisedService(build_device, EngineConfig(), timeouts, first=look), Listener()
    service.start(listener)
    try:
        yield service, listener
    finally:
        service.stop()


def test_an_engine_waits_for_it_and_messages_that_came_before_are_kept():
    first: Looked = Future()
    with serving(build_told, first) as (service, listener):
        service.send(submit("early"))
        assert service.state.phase is ServicePhase.STARTING
        first.set_result(FirstAdapters(count=3, rank=16, pages=6))

        assert listener.wait_for_ending("early").fault is None
        assert [stage.began_s for stage in service.state.start] == [16.0]


def test_the_next_engine_is_told_again():
    first: Looked = Future()
    first.set_result(FirstAdapters(count=1, rank=8))
    with serving(build_told, first) as (service, _):
        service.wait_until_ready(TIMEOUT_S)
        before = service.engine_pid
        os.kill(before, signal.SIGKILL)
        assert until(lambda: service.state.capacity and service.state.engine_pid != before)
        assert [stage.began_s for stage in service.state.restart] == [8.0]


def test_a_device_that_does_not_ask_serves_without_it():
    first: Looked = Future()
    first.set_result(FirstAdapters(count=1, rank=8))
    with serving(FakeDevice, first) as (service, listener):
        service.send(submit("asks"))
        assert listener.wait_for_ending("asks").fault is None


def test_a_service_stops_though_it_is_not_known_yet():
    first: Looked = Future()
    with serving(build_told, first) as (service, _):
        assert until(lambda: service.engine_pid is not None)
    first.set_result(FirstAdapters())  # the thread that looks ends with the test


def test_several_that_ask_for_it_get_one_look():
    looks = []
    look = AdapterLook(lambda: looks.append(1) or FirstAdapters(count=5))
    assert {look.begin().result(TIMEOUT_S) for _ in range(3)} == {FirstAdapters(count=5)}
    assert looks == [1]


def test_a_look_that_fails_is_the_reason_why_nothing_starts():
    first: Looked = Future()
    first.set_exception(OSError("the disk is gone"))
    with serving(build_told, first) as (service, _), pytest.raises(EngineDiedError, match="the disk is gone"):
        service.wait_until_ready(TIMEOUT_S)


def test_without_a_server_that_tells_there_are_none():
    assert START.wait_for_first() == FirstAdapters()
