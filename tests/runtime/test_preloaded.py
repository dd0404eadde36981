from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest

from rota.core.config import EngineConfig
from rota.core.errors import AdapterError, EngineDiedError, FaultCode, ModelError
from rota.core.events import AdapterRefused, FinishReason
from rota.core.ids import AdapterId
from rota.core.plan import StepPlan
from rota.runtime.preloaded import PreloadedService
from rota.runtime.service import BuildDevice, InProcessService, Phase
from rota.runtime.supervisor import SupervisedService
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice, FakeTicket
from tests.runtime.services import Listener
from tests.waiting import PATIENCE_S


def preloaded(build_device: BuildDevice, *paths: str) -> tuple[PreloadedService, Listener]:
    adapters = [add_adapter(number, path=path).adapter for number, path in enumerate(paths, 1)]
    service, listener = PreloadedService(InProcessService(build_device, EngineConfig()), adapters), Listener()
    service.start(listener)
    return service, listener


def test_it_is_ready_when_its_adapters_are_and_a_request_for_one_may_come_earlier():
    may_start = threading.Event()

    def build() -> FakeDevice:
        assert may_start.wait(PATIENCE_S)
        return FakeDevice()

    service, listener = preloaded(build, "one", "two", "three")
    service.send(submit("early", adapter=AdapterId(3)))
    assert service.state.phase is Phase.STARTING
    may_start.set()

    assert service.wait_until_ready(5.0) == FakeDevice().capacity
    assert service.state.phase is Phase.READY
    assert listener.wait_for_ending("early").fault is None
    service.stop()


def test_an_adapter_that_is_refused_keeps_it_from_starting():
    service, _ = preloaded(FakeDevice, "one", "broken", "three")

    with pytest.raises(AdapterError, match="broken is broken"):
        service.wait_until_ready(5.0)
    assert (service.state.phase, service.state.reason) == (Phase.DOWN, "broken is broken.")
    service.stop()


def no_such_model() -> FakeDevice:
    raise ModelError("There is no model in /nowhere.")


def test_an_engine_that_cannot_start_says_why_before_any_adapter_does():
    service, _ = preloaded(no_such_model, "one")

    with pytest.raises(EngineDiedError, match="no model in /nowhere"):
        service.wait_until_ready(5.0)
    service.stop()


class EndlessDisk(FakeDevice):
    """Idle reads never end; others do."""

    def submit(self, plan: StepPlan) -> FakeTicket:
        return FakeDevice.submit(self, replace(plan, idle_fetches=()))


def test_it_is_ready_before_its_adapters_are_read_and_a_request_waits_for_its_own_alone():
    service, listener = preloaded(EndlessDisk, "one", "two", "three")
    assert service.wait_until_ready(PATIENCE_S)

    service.send(submit("asks", adapter=AdapterId(3)))
    assert listener.wait_for_ending("asks").fault is None
    service.stop()


def test_it_stops_while_adapters_are_being_read():
    service, listener = preloaded(EndlessDisk, "one", "two")
    assert service.wait_until_ready(PATIENCE_S)
    service.send(submit("waits", adapter=AdapterId(1)))  # for a read that never ends
    service.stop()

    assert listener.wait_for_ending("waits").reason is FinishReason.ABORT


def test_an_adapter_that_turns_out_bad_after_the_start_is_told_and_its_requests_fail():
    service, listener = preloaded(FakeDevice, "one", "rotten")
    assert service.wait_until_ready(PATIENCE_S)

    assert listener.wait_for_adapter(2, AdapterRefused).reason == "rotten is rotten."
    assert service.state.phase is Phase.READY
    service.send(submit("late", adapter=AdapterId(2)))
    assert listener.wait_for_ending("late").fault.code is FaultCode.UNKNOWN_ADAPTER
    service.send(submit("other", adapter=AdapterId(1)))
    assert listener.wait_for_ending("other").fault is None
    service.stop()


def test_an_engine_that_is_killed_while_it_reads_comes_back_with_all_adapters():
    adapters = [add_adapter(number).adapter for number in (1, 2, 3)]
    engine, listener = SupervisedService(EndlessDisk, EngineConfig()), Listener()
    service = PreloadedService(engine, adapters)
    service.start(listener)
    try:
        service.wait_until_ready(PATIENCE_S)
        service.send(submit("waits", adapter=AdapterId(1)))  # for a read that never ends
        os.kill(engine.engine_pid, signal.SIGKILL)
        assert listener.wait_for_ending("waits").fault.code is FaultCode.ENGINE_DIED

        service.send(submit("again", adapter=AdapterId(3)))  # before the new engine is ready
        assert listener.wait_for_ending("again").fault is None
        assert service.state.phase is Phase.READY
    finally:
        service.stop()
