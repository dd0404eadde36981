"""A paused service stays paused when its engine dies, and for replicas that join; it ends when the service closes."""

from __future__ import annotations

import os
import signal

import pytest

from rota.core.config import EngineConfig
from rota.core.errors import FaultCode, RequestError
from rota.core.events import Event, FinishReason, PauseChanged
from rota.core.messages import Pause, Resume
from rota.runtime.client import EngineClient
from rota.runtime.in_process import InProcessService
from rota.runtime.promises import Promises
from rota.runtime.service import ServicePhase
from tests.builders import submit
from tests.fakes import continuation, endings, outputs
from tests.runtime.replicas.fakes import FakeReplica, desk_of
from tests.runtime.services import LONG, SLOW, Listener, supervised
from tests.waiting import TIMEOUT_S, until


def pauses(events: list[Event]) -> list[bool]:
    return [event.is_paused for event in events if isinstance(event, PauseChanged)]


def test_the_engine_of_a_paused_service_dies_and_the_next_one_is_paused_too():
    with supervised(SLOW) as (service, listener):
        service.send(submit("lost", max_new_tokens=LONG))
        listener.wait_for_tokens("lost", 2)
        service.send(Pause(0.0))
        assert until(lambda: pauses(listener.events) == [True])
        os.kill(service.engine_pid, signal.SIGKILL)
        assert listener.wait_for_ending("lost").fault.code is FaultCode.ENGINE_DIED

        new = submit("new", max_new_tokens=5)
        service.send(new)
        assert until(lambda: pauses(listener.events) == [True, True]), "the new engine is not paused"
        assert "new" not in outputs(listener.events)
        service.send(Resume(0.0))
        assert listener.wait_for_ending("new").reason is FinishReason.LENGTH
        assert outputs(listener.events)["new"] == continuation(new.prompt, 5)


@pytest.mark.parametrize(
    ("orders", "told"),
    [([], 0), ([Pause(0.0)], 1), ([Pause(0.0, is_drained=True)], 1), ([Pause(0.0), Resume(1.0)], 0)],
)
def test_a_new_engine_is_told_of_a_pause_that_lasts(orders, told):
    promises = Promises()
    for order in orders:
        promises.note_message(order)
    promises.break_all("The engine is gone.")

    introduced = promises.introductions()
    assert len(introduced) == told
    # What was open has ended with the engine, so there is nothing to drain.
    assert not any(one.is_drained for one in introduced)


def test_every_replica_is_paused_those_that_start_and_those_that_join_later_too():
    desk, [ready, starting] = desk_of()
    starting.become(ServicePhase.STARTING)
    desk.send(Pause(1.0))
    newcomer = FakeReplica(ServicePhase.STARTING)
    desk.add(newcomer)
    assert [type(one) for replica in (ready, starting, newcomer) for one in replica.sent] == [Pause] * 3

    desk.send(Resume(2.0))
    late = FakeReplica(ServicePhase.STARTING)
    desk.add(late)
    assert isinstance(starting.sent[-1], Resume)
    assert late.sent == []


def test_a_paused_service_that_closes_answers_what_is_open():
    service, listener = EngineClient(InProcessService(SLOW, EngineConfig())), Listener()
    service.start(listener)
    service.wait_until_ready()
    try:
        service.send(submit("open", max_new_tokens=12))
        listener.wait_for_tokens("open", 2)
        service.send(Pause(0.0))
        assert until(lambda: pauses(listener.events) == [True])
        service.drain(TIMEOUT_S)
        assert endings(listener.events)["open"].reason is FinishReason.LENGTH
        with pytest.raises(RequestError, match="stopping"):
            service.send(Pause(0.0))
    finally:
        service.stop()
