from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from rota.core.config import EngineConfig
from rota.core.errors import EngineDiedError, FaultCode, RequestError
from rota.core.events import FinishReason
from rota.runtime.in_process import InProcessService
from rota.runtime.service import BuildDevice, ServicePhase
from tests.builders import abort, submit
from tests.fakes import FakeDevice, continuation, no_such_model, outputs
from tests.runtime.services import LONG, SLOW, Listener
from tests.waiting import TIMEOUT_S


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def device() -> FakeDevice:
    return SLOW()


@pytest.fixture
def slow(device: FakeDevice, listener: Listener) -> Iterator[InProcessService]:
    service = start(lambda: device, listener)
    yield service
    service.stop()


def start(build_device: BuildDevice, listener: Listener) -> InProcessService:
    service = InProcessService(build_device, EngineConfig())
    service.start(listener)
    return service


def test_a_request_is_answered(slow, listener):
    message = submit("a", max_new_tokens=5)
    slow.send(message)

    assert listener.wait_for_ending("a").reason is FinishReason.LENGTH
    assert outputs(listener.events)["a"] == continuation(message.prompt, 5)


def test_readiness_tells_the_capacity(slow):
    assert slow.wait_until_ready(TIMEOUT_S) == SLOW().capacity
    assert slow.state.phase is ServicePhase.READY


def test_an_abort_takes_effect_within_a_step(slow, device, listener):
    slow.send(submit("a", max_new_tokens=LONG))
    listener.wait_for_tokens("a", 3)
    slow.send(abort("a"))
    steps = len(device.plans)

    assert listener.wait_for_ending("a").reason is FinishReason.ABORT
    assert len(device.plans) <= steps + 1, "the loop may have been about to begin a step; it begins no other"


def test_stopping_aborts_whoever_is_open_and_refuses_newcomers(slow, listener):
    slow.send(submit("a", max_new_tokens=LONG))
    listener.wait_for_tokens("a")
    slow.stop()

    assert listener.wait_for_ending("a", timeout_s=0.0).reason is FinishReason.ABORT
    with pytest.raises(RequestError, match="stopped"):
        slow.send(submit("b"))


def test_events_come_from_one_thread(slow, listener):
    for name in "abc":
        slow.send(submit(name))
    for name in "abc":
        listener.wait_for_ending(name)

    assert len(listener.threads) == 1


def test_a_device_that_cannot_be_built_says_why_to_all_who_ask(listener):
    service = start(no_such_model, listener)

    with pytest.raises(EngineDiedError, match="no model in /nowhere"):
        service.wait_until_ready(TIMEOUT_S)
    assert service.state.phase is ServicePhase.DOWN
    with pytest.raises(RequestError, match="no model in /nowhere"):
        service.send(submit("a"))


def broken(_tokens):
    raise ZeroDivisionError("a kernel went wrong")


def test_a_device_that_breaks_ends_the_open_requests(listener, capsys):
    service = start(partial(FakeDevice, next_token=broken), listener)
    service.send(submit("a"))

    ending = listener.wait_for_ending("a")
    assert ending.reason is FinishReason.FAILED
    assert ending.fault is not None
    assert ending.fault.code is FaultCode.ENGINE_DIED
    assert "a kernel went wrong" in ending.fault.message
    service.stop()
    assert "ZeroDivisionError" in capsys.readouterr().err
