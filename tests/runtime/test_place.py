"""An engine that has no place to run: what its supervisor tells of it, and how long that may last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rota.core.config import EngineConfig
from rota.core.events import FinishReason
from rota.runtime.process import EngineProcess
from rota.runtime.service import BuildDevice, ServicePhase
from rota.runtime.supervisor import SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from rota.runtime.watch import Death, OnEvents, OnReady, OnWaiting, Watch
from tests.builders import submit
from tests.fakes import FakeDevice
from tests.runtime.services import Listener
from tests.waiting import hang, until


class Place:
    """Why there is none, and how often somebody asked."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.asked = 0

    def ask(self) -> str:
        self.asked += 1
        return self.why


class PlacedEngine(EngineProcess):
    """A process here that is told to be waiting for a place."""

    def __init__(self, place: Place, *rest) -> None:
        super().__init__(*rest)
        self._place = place

    def watch(self, on_ready: OnReady, on_events: OnEvents, timeouts: EngineTimeouts, on_waiting: OnWaiting) -> Death:
        watch = Watch(self._process, self._inbox, on_ready, on_events, timeouts, self._place.ask, on_waiting)
        return watch.until_death()


@contextmanager
def waiting(build: BuildDevice, place: Place, timeouts: EngineTimeouts) -> Iterator[tuple[SupervisedService, Listener]]:
    service = SupervisedService(build, EngineConfig(), timeouts, partial(PlacedEngine, place))
    listener = Listener()
    service.start(listener)
    try:
        yield service, listener
    finally:
        service.stop()


def test_the_state_says_what_an_engine_without_a_place_waits_for_and_the_log_says_it_once(caplog):
    place = Place("It needs 1 GPU, and the cluster has 0 free.")
    with waiting(hang, place, EngineTimeouts()) as (service, _):
        assert until(lambda: service.state.may_last)
        assert (service.state.phase, service.state.reason) == (ServicePhase.STARTING, place.why)
        place.why = "The cluster is gone."
        assert until(lambda: service.state.reason == "The cluster is gone.")
        place.why = ""
        assert until(lambda: not service.state.may_last)
        assert (service.state.phase, service.state.reason) == (ServicePhase.STARTING, "")
    [record] = [record for record in caplog.records if record.name == "rota.engine"]
    assert record.fields == {"engine": 0, "why": "It needs 1 GPU, and the cluster has 0 free."}


def test_the_wait_for_a_place_is_no_silence_of_the_engine_and_what_comes_after_is():
    place = Place("The cluster is gone.")
    with waiting(hang, place, EngineTimeouts(start_silence_s=0.05)) as (service, _):
        assert until(lambda: place.asked > 5), "each look takes 0.05 seconds"
        assert service.state.phase is ServicePhase.STARTING
        place.why = ""
        assert until(lambda: service.state.phase is ServicePhase.DOWN)
        assert service.state.reason == "The engine hung: its start made no progress for 0.05 seconds."


def test_an_engine_that_gets_its_place_serves_what_was_sent_before():
    place = Place("The cluster is gone.")
    with waiting(FakeDevice, place, EngineTimeouts()) as (service, listener):
        assert until(lambda: service.state.may_last)
        service.send(submit("a"))
        place.why = ""
        assert listener.wait_for_ending("a").reason is FinishReason.LENGTH
        assert (service.state.phase, service.state.may_last) == (ServicePhase.READY, False)
