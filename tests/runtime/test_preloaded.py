from __future__ import annotations

import threading

import pytest

from rota.core.config import EngineConfig
from rota.core.errors import AdapterError, EngineDiedError, ModelError
from rota.core.ids import AdapterId
from rota.runtime.preloaded import PreloadedService
from rota.runtime.service import BuildDevice, InProcessService, Phase
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice
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
