"""Replicas in threads of this process: what a client of one service sees of several engines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import pytest

from rota.core.adapter import Adapter
from rota.core.errors import EngineDiedError, FaultCode, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Event, FinishReason, Inspected, Produced
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, Inspect, Message, RemoveAdapter
from rota.core.tenant import Tenant
from rota.runtime.client import EngineClient
from rota.runtime.in_process import InProcessService
from rota.runtime.replicas.router import Router
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.service import BuildDevice, ServicePhase
from tests.builders import abort, add_adapter, submit
from tests.fakes import FakeDevice, continuation, endings, folded, no_such_model, outputs
from tests.runtime.services import LONG, SLOW, Listener, heard
from tests.server.engines import configs
from tests.waiting import TIMEOUT_S, until


def replicated(*builds: BuildDevice) -> AbstractContextManager[tuple[ReplicatedService, Listener]]:
    """One replica for each way to build a device; requests go to them in turn."""
    replicas = [InProcessService(build, one) for build, one in zip(builds, configs(None, len(builds)), strict=True)]
    return heard(ReplicatedService(replicas, Router(len(builds), "round-robin")))


def engines_of(listener: Listener) -> set[int]:
    return {event.engine_id for event in listener.events if isinstance(event, Produced)}


def test_requests_are_shared_and_each_gets_the_answer_that_one_engine_would_give():
    with replicated(FakeDevice, FakeDevice) as (service, listener):
        service.wait_until_ready()  # before that one replica takes all
        asked = [submit(f"r{number}", max_new_tokens=5) for number in range(6)]
        for message in asked:
            service.send(message)
        for message in asked:
            assert listener.wait_for_ending(message.request_id).reason is FinishReason.LENGTH

    given = outputs(listener.events)
    assert {message.request_id: continuation(message.prompt, 5) for message in asked} == given
    assert engines_of(listener) == {0, 1}


def test_an_abort_reaches_the_replica_of_its_request():
    with replicated(SLOW, SLOW) as (service, listener):
        service.wait_until_ready()
        for name in "ab":
            service.send(submit(name, max_new_tokens=LONG))
            listener.wait_for_tokens(name)
        service.send(abort("b"))

        assert listener.wait_for_ending("b").reason is FinishReason.ABORT
        assert "a" not in endings(listener.events)


def test_every_replica_answers_for_itself():
    with replicated(FakeDevice, FakeDevice, FakeDevice) as (service, listener):
        service.wait_until_ready()
        service.send(Inspect(0.0))

        assert until(lambda: len([one for one in listener.events if isinstance(one, Inspected)]) == 3)
        assert {one.engine_id for one in listener.events if isinstance(one, Inspected)} == {0, 1, 2}


class Crossing:
    """A receiver of events that notes whether a second thread came in before the first had left."""

    def __init__(self) -> None:
        self.inside = 0
        self.has_crossed = False
        self.threads: set[int] = set()
        self._rest = threading.Event()

    def __call__(self, _events: list[Event]) -> None:
        self.inside += 1
        self.threads.add(threading.get_ident())
        self._rest.wait(0.002)  # time for another thread to come in
        self.has_crossed = self.has_crossed or self.inside > 1
        self.inside -= 1


def test_events_of_all_replicas_are_delivered_by_one_thread_at_a_time():
    crossing = Crossing()
    replicas = [InProcessService(FakeDevice, one) for one in configs(None, 3)]
    service = ReplicatedService(replicas, Router(3, "round-robin"))
    service.start(crossing)
    service.wait_until_ready()
    for number in range(9):
        service.send(submit(str(number), max_new_tokens=20))
    assert until(lambda: len(crossing.threads) == 3)
    service.stop()

    assert not crossing.has_crossed


class Picky(FakeDevice):
    """Cannot read what the other replica can."""

    def fetch(self, adapter: Adapter) -> Message:
        if "odd" in adapter.path:
            return AdapterFailed(adapter_id=adapter.adapter_id, at=self.now(), reason="This device cannot read it.")
        return super().fetch(adapter)


def test_an_adapter_that_one_replica_cannot_read_is_refused_and_stays_nowhere():
    with replicated(FakeDevice, Picky) as (service, listener):
        service.send(add_adapter(1, path="odd"))
        refusal = listener.wait_for_adapter(1, AdapterRefused)
        assert isinstance(refusal, AdapterRefused)
        assert refusal.reason == "This device cannot read it."
        for name in "ab":  # one to each replica
            service.send(submit(name, adapter=AdapterId(1)))
            assert listener.wait_for_ending(name).fault.code is FaultCode.UNKNOWN_ADAPTER
        service.send(add_adapter(2, path="fine"))
        listener.wait_for_adapter(2, AdapterAdded)
        for name in "cd":
            service.send(submit(name, adapter=AdapterId(2)))
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
        service.send(RemoveAdapter(adapter_id=AdapterId(2), at=0.0))
        listener.wait_for_adapter(2, AdapterRemoved)
    told = [event for event in listener.events if isinstance(event, AdapterAdded | AdapterRefused | AdapterRemoved)]
    assert [(type(event), event.adapter_id) for event in told] == [
        (AdapterRefused, 1),
        (AdapterAdded, 2),
        (AdapterRemoved, 2),
    ]


def test_a_service_starts_with_all_its_replicas_or_not_at_all():
    with replicated(FakeDevice, no_such_model) as (service, _):
        with pytest.raises(EngineDiedError, match=r"^Replica 1 is down: There is no model in /nowhere\.$"):
            service.wait_until_ready()
        with pytest.raises(RequestError, match="/nowhere"):
            service.send(submit("a"))
        assert service.state.phase is ServicePhase.DOWN


def test_it_is_ready_when_the_last_replica_is():
    may_start = threading.Event()

    def late() -> FakeDevice:
        assert may_start.wait(TIMEOUT_S)
        return FakeDevice()

    with replicated(FakeDevice, late) as (service, _):
        assert until(lambda: service.state.engines[0].phase is ServicePhase.READY)
        assert service.state.phase is ServicePhase.STARTING
        with pytest.raises(EngineDiedError, match=r"Not all replicas are ready after 0\.1 seconds"):
            service.wait_until_ready(0.1)
        may_start.set()
        service.wait_until_ready()
        assert service.state.phase is ServicePhase.READY


def newcomer(service: ReplicatedService, build: BuildDevice) -> InProcessService:
    return InProcessService(build, configs(None, len(service) + 1)[-1])


def test_a_replica_joins_a_service_of_one_and_serves_its_adapters():
    with replicated(SLOW) as (service, listener):
        service.send(add_adapter(1))
        listener.wait_for_adapter(1, AdapterAdded)
        service.send(submit("long", max_new_tokens=LONG))
        listener.wait_for_tokens("long")
        may_start = threading.Event()

        def late() -> FakeDevice:
            assert may_start.wait(TIMEOUT_S)
            return SLOW()

        assert service.add(newcomer(service, late)) == 1
        assert [engine.engine_id for engine in service.state.engines] == [0, 1]
        assert service.state.phase is ServicePhase.READY
        service.send(submit("early", adapter=AdapterId(1)))
        assert listener.wait_for_ending("early").reason is FinishReason.LENGTH
        assert engines_of(listener) == {0}

        may_start.set()
        assert until(lambda: not service._desk._adapters.lacking(AdapterId(1), [1]))
        for name in "ab":
            service.send(submit(name, adapter=AdapterId(1)))
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
        assert engines_of(listener) == {0, 1}
        service.send(RemoveAdapter(adapter_id=AdapterId(1), at=0.0))
        listener.wait_for_adapter(1, AdapterRemoved)
        for name in "cd":
            service.send(submit(name, adapter=AdapterId(1)))
            assert listener.wait_for_ending(name).fault.code is FaultCode.UNKNOWN_ADAPTER
    told = [event for event in listener.events if isinstance(event, AdapterAdded | AdapterRefused | AdapterRemoved)]
    assert [type(event) for event in told] == [AdapterAdded, AdapterRemoved]


def test_a_replica_that_joins_and_cannot_start_leaves_the_service_as_it_was(caplog):
    with replicated(SLOW) as (service, listener):
        service.wait_until_ready()
        service.add(newcomer(service, no_such_model))
        assert until(lambda: "There is no model" in service.state.reason)
        assert service.state.phase is ServicePhase.READY
        service.send(submit("a"))
        assert listener.wait_for_ending("a").reason is FinishReason.LENGTH
    assert [record.message for record in caplog.records] == ["A replica that joined cannot start."]


def test_no_replica_joins_before_the_start_or_after_the_end():
    service = ReplicatedService([InProcessService(SLOW, one) for one in configs(None, 1)])
    with pytest.raises(RequestError, match="was started and not stopped"):
        service.add(newcomer(service, SLOW))
    service.start(Listener())
    service.stop()
    with pytest.raises(RequestError, match="was started and not stopped"):
        service.add(newcomer(service, SLOW))


def breaks_at_ten(tokens: Sequence[int]) -> int:
    if len(tokens) == 10:
        raise ZeroDivisionError("a kernel went wrong")
    return folded(tokens)


@pytest.mark.usefixtures("capsys")
def test_a_replica_that_stays_down_ends_its_own_requests_and_the_last_one_ends_the_service():
    fragile = partial(FakeDevice, next_token=breaks_at_ten)
    with replicated(fragile, fragile) as (service, listener):
        service.wait_until_ready()
        service.send(submit("lost", prompt=8, max_new_tokens=50))
        service.send(submit("short", prompt=3, max_new_tokens=4))
        assert listener.wait_for_ending("lost").fault.code is FaultCode.ENGINE_DIED
        assert listener.wait_for_ending("short").reason is FinishReason.LENGTH
        assert service.state.phase is ServicePhase.READY
        assert "Replica 0 is down" in service.state.reason

        for name in "ab":
            service.send(submit(name, prompt=3, max_new_tokens=4))
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
        service.send(submit("last", prompt=8, max_new_tokens=50))
        assert listener.wait_for_ending("last").fault.code is FaultCode.ENGINE_DIED
        with pytest.raises(RequestError, match="a kernel went wrong"):
            service.send(submit("late"))
        assert service.state.phase is ServicePhase.DOWN


def test_a_tenants_limit_holds_over_all_replicas_at_every_moment():
    running: set[str] = set()
    most_running = 0

    class Watching(Listener):
        def __call__(self, events: list[Event]) -> None:
            nonlocal most_running
            for event in events:
                if isinstance(event, Produced):
                    running.update(event.request_ids)
                    most_running = max(most_running, len(running))
                    if most_running == 3:
                        three_run.set()
                running.discard(getattr(event, "request_id", ""))
            super().__call__(events)

    are_sent, three_run = threading.Event(), threading.Event()

    def says(tokens: Sequence[int]) -> int:
        """Nobody begins before all have asked, and nobody ends before three have begun."""
        assert are_sent.wait(TIMEOUT_S)
        assert len(tokens) < 30 or three_run.wait(TIMEOUT_S)
        return folded(tokens)

    acme = Tenant(name="acme", max_running=3)
    replicas = [InProcessService(partial(FakeDevice, next_token=says), one) for one in configs(None, 2)]
    service, listener = ReplicatedService(replicas, Router(2, "round-robin")), Watching()
    service.start(listener)
    service.wait_until_ready()
    names = [f"r{number}" for number in range(12)]
    for name in names:
        service.send(submit(name, max_new_tokens=40, tenant=acme))
    are_sent.set()
    for name in names:
        assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
    service.stop()

    assert most_running == 3
    assert engines_of(listener) == {0, 1}


def test_a_burst_of_one_tenant_does_not_keep_a_neighbour_waiting_on_any_replica():
    """Eight rows a replica; a burst without end on all of them, and a neighbour that comes late."""
    with replicated(SLOW, SLOW) as (service, listener):
        service.wait_until_ready()
        for number in range(40):
            service.send(submit(f"burst{number}", prompt=2, max_new_tokens=LONG, tenant="burst"))
        listener.wait_for_tokens("burst0", 5)
        for name in "ab":  # one to each replica
            service.send(submit(name, prompt=2, max_new_tokens=3, tenant="neighbour"))
        for name in "ab":
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH

        assert not [id for id in endings(listener.events) if id.startswith("burst")]


def test_a_stop_aborts_whoever_is_open_and_ends_who_is_held():
    tenant = Tenant(name="acme", max_running=1)
    with replicated(SLOW, SLOW) as (service, listener):
        for name in "ab":
            service.send(submit(name, max_new_tokens=LONG, tenant=tenant))
        listener.wait_for_tokens("a")
        service.stop()

        assert {id: one.reason for id, one in endings(listener.events).items()} == dict.fromkeys(
            "ab", FinishReason.ABORT
        )


def test_the_layers_above_work_over_several_engines_as_over_one():
    adapters = [add_adapter(number).adapter for number in (1, 2)]
    replicas = [InProcessService(FakeDevice, one) for one in configs(None, 2)]
    service = EngineClient(ReplicatedService(replicas), adapters)
    listener = Listener()
    service.start(listener)
    assert service.wait_until_ready().slots == 2
    for name, adapter in (("a", 1), ("b", 2), ("c", 1)):
        service.send(submit(name, max_new_tokens=20, adapter=AdapterId(adapter)))
    service.drain(TIMEOUT_S)

    assert {one.reason for one in endings(listener.events).values()} == {FinishReason.LENGTH}
    assert service.state.phase is ServicePhase.CLOSING
    with pytest.raises(RequestError, match="is stopping"):
        service.send(submit("late"))
    service.stop()
    assert service.state.phase is ServicePhase.STOPPED
