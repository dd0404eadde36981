"""A client of an engine: requests and adapters from before its start until its end."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from rota.core.config import EngineConfig
from rota.core.errors import AdapterError, EngineDiedError, FaultCode, RequestError
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    EngineRestarted,
    Event,
    Finished,
    FinishReason,
)
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, Message, MoveRequests, RemoveAdapter
from rota.core.plan import StepPlan
from rota.core.request import Request
from rota.runtime.client import EngineClient, early_of
from rota.runtime.in_process import InProcessService
from rota.runtime.live import MOST_CHECKED
from rota.runtime.service import BuildDevice, Service, ServicePhase
from rota.runtime.supervisor import SupervisedService
from tests.builders import abort, add_adapter, submit
from tests.fakes import FakeDevice, FakeTicket, folded, no_such_model
from tests.runtime.services import Listener
from tests.waiting import TIMEOUT_S, until

# ── before its events have a reader ───────────────────────────────────────────────────────────────────────────────────


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


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def preloaded(build_device: BuildDevice, *paths: str) -> tuple[EngineClient, Listener]:
    adapters = [add_adapter(number, path=path).adapter for number, path in enumerate(paths, 1)]
    service, listener = EngineClient(InProcessService(build_device, EngineConfig()), adapters), Listener()
    service.start(listener)
    return service, listener


def test_it_is_ready_when_its_adapters_are_and_a_request_for_one_may_come_earlier():
    may_start = threading.Event()

    def build() -> FakeDevice:
        assert may_start.wait(TIMEOUT_S)
        return FakeDevice()

    service, listener = preloaded(build, "one", "two", "three")
    service.send(submit("early", adapter=AdapterId(3)))
    assert service.state.phase is ServicePhase.STARTING
    may_start.set()

    assert service.wait_until_ready() == FakeDevice().capacity
    assert service.state.phase is ServicePhase.READY
    assert listener.wait_for_ending("early").fault is None
    service.stop()


def test_an_adapter_that_is_refused_keeps_it_from_starting():
    service, _ = preloaded(FakeDevice, "one", "broken", "three")

    with pytest.raises(AdapterError, match="broken is broken"):
        service.wait_until_ready()
    assert (service.state.phase, service.state.reason) == (ServicePhase.DOWN, "broken is broken.")
    service.stop()


def test_an_engine_that_cannot_start_says_why_before_any_adapter_does():
    service, _ = preloaded(no_such_model, "one")

    with pytest.raises(EngineDiedError, match="no model in /nowhere"):
        service.wait_until_ready()
    service.stop()


class EndlessDisk(FakeDevice):
    """Idle reads never end; others do."""

    def submit(self, plan: StepPlan) -> FakeTicket:
        return FakeDevice.submit(self, replace(plan, idle_fetches=()))


def test_it_is_ready_before_its_adapters_are_read_and_a_request_waits_for_its_own_alone():
    service, listener = preloaded(EndlessDisk, "one", "two", "three")
    assert service.wait_until_ready(TIMEOUT_S)

    service.send(submit("asks", adapter=AdapterId(3)))
    assert listener.wait_for_ending("asks").fault is None
    service.stop()


def test_it_stops_while_adapters_are_being_read():
    service, listener = preloaded(EndlessDisk, "one", "two")
    assert service.wait_until_ready(TIMEOUT_S)
    service.send(submit("waits", adapter=AdapterId(1)))  # for a read that never ends
    service.stop()

    assert listener.wait_for_ending("waits").reason is FinishReason.ABORT


def test_an_adapter_that_turns_out_bad_after_the_start_is_told_and_its_requests_fail():
    service, listener = preloaded(FakeDevice, "one", "rotten")
    assert service.wait_until_ready(TIMEOUT_S)

    assert listener.wait_for_adapter(2, AdapterRefused).reason == "rotten is rotten."
    assert service.state.phase is ServicePhase.READY
    service.send(submit("late", adapter=AdapterId(2)))
    assert listener.wait_for_ending("late").fault.code is FaultCode.UNKNOWN_ADAPTER
    service.send(submit("other", adapter=AdapterId(1)))
    assert listener.wait_for_ending("other").fault is None
    service.stop()


def test_an_engine_that_is_killed_while_it_reads_comes_back_with_all_adapters():
    adapters = [add_adapter(number).adapter for number in (1, 2, 3)]
    engine, listener = SupervisedService(EndlessDisk, EngineConfig()), Listener()
    service = EngineClient(engine, adapters)
    service.start(listener)
    try:
        service.wait_until_ready(TIMEOUT_S)
        service.send(submit("waits", adapter=AdapterId(1)))  # for a read that never ends
        os.kill(engine.engine_pid, signal.SIGKILL)
        assert listener.wait_for_ending("waits").fault.code is FaultCode.ENGINE_DIED

        service.send(submit("again", adapter=AdapterId(3)))  # before the new engine is ready
        assert listener.wait_for_ending("again").fault is None
        assert service.state.phase is ServicePhase.READY
    finally:
        service.stop()


class Noting(InProcessService):
    """Remembers the adapters that it was told of, and those that requests asked for."""

    def __init__(self, build_device: BuildDevice = FakeDevice) -> None:
        super().__init__(build_device, EngineConfig())
        self.told: list[tuple[str, int]] = []

    def send(self, message: Message) -> None:
        if isinstance(message, AddAdapter):
            self.told.append(("added", message.adapter.adapter_id))
        if isinstance(message, Request):
            self.told.append(("asked", message.adapter_id))
        super().send(message)


def many(engine: Service, adapters: int, early: int, **fields: Any) -> tuple[EngineClient, Listener]:
    """A service with so many adapters, of which the last has these fields."""
    named = [add_adapter(number, **(fields if number == adapters else {})).adapter for number in range(1, adapters + 1)]
    service, listener = EngineClient(engine, named, early), Listener()
    service.start(listener)
    return service, listener


@pytest.mark.parametrize(
    ("adapters", "held", "early"),
    [(0, 128, 0), (MOST_CHECKED, 128, MOST_CHECKED), (MOST_CHECKED + 1, 128, 128), (10_000, 4, 64), (10_000, 900, 900)],
)
def test_an_engine_hears_of_all_adapters_unless_they_are_thousands(adapters, held, early):
    assert early_of(adapters, held) == early


def test_of_many_adapters_an_engine_hears_of_the_first_and_the_pinned_ones_alone():
    engine = Noting()
    service, listener = many(engine, adapters=9, early=2, is_pinned=True)
    service.wait_until_ready(TIMEOUT_S)

    assert engine.told == [("added", 1), ("added", 2), ("added", 9)]
    for number in range(1, 10):
        listener.wait_for_adapter(number, AdapterAdded)  # for clients they are all there
    service.stop()


def test_an_engine_hears_of_each_other_adapter_once_before_the_first_request_for_it():
    engine = Noting()
    service, listener = many(engine, adapters=9, early=2)
    for number in range(3):
        service.send(submit(f"r{number}", adapter=AdapterId(7)))
        assert listener.wait_for_ending(f"r{number}").fault is None

    assert engine.told[2:] == [("added", 7), ("asked", 7), ("asked", 7), ("asked", 7)]
    service.stop()


def test_threads_that_ask_for_one_adapter_at_once_all_get_answers():
    engine = Noting()
    service, listener = many(engine, adapters=40, early=2)
    names = [f"r{number}" for number in range(8)]

    def ask(name: str) -> None:
        for adapter in range(3, 41):
            service.send(submit(f"{name}/{adapter}", adapter=AdapterId(adapter)))

    askers = [threading.Thread(target=ask, args=(name,)) for name in names]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(TIMEOUT_S)

    assert all(listener.wait_for_ending(f"{name}/{a}").fault is None for name in names for a in range(3, 41))
    assert sorted(a for what, a in engine.told if what == "added") == list(range(1, 41))
    service.stop()


def test_an_adapter_that_nobody_asked_for_is_removed_like_others():
    engine = Noting()
    service, listener = many(engine, adapters=9, early=2)
    service.send(RemoveAdapter(adapter_id=AdapterId(8), at=0.0))

    assert listener.wait_for_adapter(8, AdapterRemoved)
    service.send(submit("late", adapter=AdapterId(8)))
    assert listener.wait_for_ending("late").fault.code is FaultCode.UNKNOWN_ADAPTER
    service.stop()


def test_both_versions_of_a_move_are_told():
    engine = Noting()
    service, _ = many(engine, adapters=9, early=2)
    service.send(MoveRequests(old=AdapterId(4), new=AdapterId(5), at=0.0))

    assert engine.told[2:] == [("added", 4), ("added", 5)]
    service.stop()


def test_one_that_turns_out_bad_when_it_is_asked_for_is_refused_with_the_reason():
    service, listener = many(Noting(), adapters=9, early=2, path="rotten")
    service.wait_until_ready(TIMEOUT_S)
    service.send(submit("asks", adapter=AdapterId(9)))

    assert listener.wait_for_ending("asks").fault.message == "rotten is rotten."
    assert listener.wait_for_adapter(9, AdapterRefused).reason == "rotten is rotten."
    assert service.state.phase is ServicePhase.READY
    service.stop()


def test_adapters_that_came_with_requests_outlive_the_engine():
    engine = SupervisedService(FakeDevice, EngineConfig())
    service, listener = many(engine, adapters=9, early=2)
    try:
        service.send(submit("before", adapter=AdapterId(7)))
        assert listener.wait_for_ending("before").fault is None
        os.kill(engine.engine_pid, signal.SIGKILL)
        assert until(lambda: any(isinstance(event, EngineRestarted) for event in listener.events))
        for number in (7, 8):
            service.send(submit(f"after{number}", adapter=AdapterId(number)))
            assert listener.wait_for_ending(f"after{number}").fault is None
    finally:
        service.stop()


# ── drains and stops ──────────────────────────────────────────────────────────────────────────────────────────────────

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
