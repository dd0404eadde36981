from __future__ import annotations

import threading

import pytest

from rota.core.config import EngineConfig
from rota.core.errors import FaultCode, RequestError
from rota.core.events import Event, Finished, FinishReason
from rota.runtime.client import EngineClient
from rota.runtime.service import ServicePhase
from tests.builders import abort, add_adapter, submit
from tests.fakes import FakeDevice, folded
from tests.in_process import InProcessService
from tests.waiting import TIMEOUT_S, until

GATE = threading.Event()


def gated(tokens) -> int:
    assert len(tokens) < 6 or GATE.wait(TIMEOUT_S)
    return folded(tokens)


@pytest.fixture
def ended() -> list[Event]:
    return []


@pytest.fixture
def service(ended):
    """A service that gets no further than a few tokens until the gate is open."""
    GATE.clear()
    service = EngineClient(InProcessService(lambda: FakeDevice(next_token=gated), EngineConfig()))
    service.start(lambda events: ended.extend(event for event in events if isinstance(event, Finished)))
    service.wait_until_ready()
    yield service
    GATE.set()
    service.stop()


def test_a_drain_returns_when_the_last_request_has_ended(service, ended):
    service.send(submit("long", max_new_tokens=20))
    closing = threading.Thread(target=service.drain, args=(10.0,))
    closing.start()
    assert until(lambda: service.state.phase is ServicePhase.CLOSING), "it does not close"
    with pytest.raises(RequestError) as refused:
        service.send(submit("late"))
    with pytest.raises(RequestError):
        service.send(add_adapter(1))

    assert refused.value.fault.code is FaultCode.STOPPING
    assert (service.open_requests, closing.is_alive()) == (1, True)
    GATE.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert [(event.request_id, event.reason) for event in ended] == [("long", FinishReason.LENGTH)]


def test_a_request_is_waited_for_until_its_ending_has_been_told():
    service = EngineClient(InProcessService(FakeDevice, EngineConfig()))
    open_when_told: list[int] = []
    service.start(
        lambda events: open_when_told.extend(service.open_requests for event in events if isinstance(event, Finished))
    )
    service.send(submit())
    service.drain(TIMEOUT_S)

    assert (open_when_told, service.open_requests) == ([1], 0)
    service.stop()


def test_a_drain_gives_up_when_its_time_is_over(service):
    service.send(submit("long", max_new_tokens=20))
    service.drain(0.05)

    assert service.open_requests == 1


def test_a_drain_of_an_idle_service_returns_at_once_and_stopping_it_is_for_good(service):
    service.drain(600.0)
    assert service.state.phase is ServicePhase.CLOSING

    service.stop()
    assert service.state.phase is ServicePhase.STOPPED


def test_a_request_may_still_be_aborted_while_the_service_drains(service, ended):
    service.send(submit("long", max_new_tokens=400))
    service.drain(0.0)
    service.send(abort("long"))
    GATE.set()
    service.drain(TIMEOUT_S)

    assert [event.reason for event in ended] == [FinishReason.ABORT]


def test_a_request_that_a_dead_service_refuses_is_not_waited_for():
    service = EngineClient(InProcessService(FakeDevice, EngineConfig()))
    service.start(lambda _: None)
    service.wait_until_ready()
    service.stop()
    with pytest.raises(RequestError):
        service.send(submit())

    assert service.open_requests == 0
