"""A service may start before its events have a reader: none is lost, and none comes twice or late."""

from __future__ import annotations

import pytest

from rota.core.config import EngineConfig
from rota.core.events import AdapterAdded
from rota.core.ids import AdapterId
from rota.runtime.client import EngineClient
from rota.runtime.service import ServicePhase
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice
from tests.in_process import InProcessService
from tests.runtime.services import Listener
from tests.waiting import TIMEOUT_S, until


class Running:
    """A service that the test speaks for."""

    def start(self, deliver):
        self.say = deliver


def test_events_before_the_reader_are_kept_in_order_and_later_ones_follow():
    running, heard = Running(), []
    service = EngineClient(running)
    first, second, third = (AdapterAdded(AdapterId(number), 0.0) for number in (1, 2, 3))
    with service.begun():
        running.say([first])
        running.say([second])
        service.start(heard.extend)
        running.say([third])

    assert heard == [first, second, third]


def test_it_serves_requests_that_came_before_its_reader():
    service, listener = EngineClient(InProcessService(FakeDevice, EngineConfig())), Listener()
    with service.begun():
        service.wait_until_ready(TIMEOUT_S)
        service.send(add_adapter(1))
        service.send(submit("early", adapter=AdapterId(1)))
        service.start(listener)

        assert listener.wait_for_ending("early").fault is None
        service.stop()


def test_a_start_that_fails_stops_what_has_begun():
    service = EngineClient(InProcessService(FakeDevice, EngineConfig()))

    def fail() -> None:
        with service.begun():
            service.wait_until_ready(TIMEOUT_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert until(lambda: service.state.phase is ServicePhase.DOWN)
