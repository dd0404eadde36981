"""The start of an engine's process: the place that it waits for, what it is told, and what it leaves to the next."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import zmq

from rota.core.config import EngineConfig, FirstAdapters
from rota.core.errors import EngineDiedError
from rota.core.events import FinishReason
from rota.core.stages import AutotuneResult, Stage
from rota.runtime.process import EngineProcess
from rota.runtime.service import BuildDevice, ServicePhase
from rota.runtime.supervisor import AdapterLook, SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from rota.runtime.watch import Death, OnEvents, OnReady, OnWaiting, Watch
from rota.start import START
from tests.builders import submit
from tests.fakes import FakeDevice
from tests.runtime.services import Heard, heard, supervised
from tests.waiting import TIMEOUT_S, hang, until


def test_an_engine_whose_sockets_find_no_place_leaves_no_folder(monkeypatch, tmp_path):
    place = tmp_path / ("deep" * 30)  # more characters than the path of a socket may have
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    context = zmq.Context()

    with pytest.raises(zmq.ZMQError):
        EngineProcess(context, FakeDevice, EngineConfig())

    assert list(place.iterdir()) == []
    context.destroy(linger=0)


# ── an engine without a place ─────────────────────────────────────────────────────────────────────────────────────────


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


def waiting(build: BuildDevice, place: Place, timeouts: EngineTimeouts) -> Heard:
    return heard(SupervisedService(build, EngineConfig(), timeouts, partial(PlacedEngine, place)))


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


# ── what its first adapters need ──────────────────────────────────────────────────────────────────────────────────────

Looked = Future[FirstAdapters]


def build_told() -> FakeDevice:
    """A device that says in its stages what it was told."""
    told = START.wait_for_first()
    return FakeDevice(stages=(Stage("rank", float(told.rank), 1.0),))


def serving(build_device: BuildDevice, first: Looked) -> Heard:
    timeouts = EngineTimeouts(quick_death_s=0.0)
    return heard(SupervisedService(build_device, EngineConfig(), timeouts, first=AdapterLook(first.result)))


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


# ── what autotune has found ───────────────────────────────────────────────────────────────────────────────────────────


def build_trying() -> FakeDevice:
    """A device that makes one trial more than it knew, and says in its stages what it knew."""
    known = START.autotuned
    START.autotuned = (*known, AutotuneResult(f"trial {len(known)}", (len(known),)))
    return FakeDevice(stages=tuple(Stage(result.name, float(result.choice[0]), 1.0) for result in known))


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_next_engine_knows_them_unless_the_last_died_quickly(is_quick):
    timeouts = EngineTimeouts(quick_death_s=1000.0 if is_quick else 0.0)
    with supervised(build_trying, timeouts) as (service, _):
        for deaths in (1,) if is_quick else (1, 2):
            service.wait_until_ready(TIMEOUT_S)
            before = service.engine_pid
            os.kill(before, signal.SIGKILL)
            assert until(lambda before=before: service.state.capacity and service.state.engine_pid != before)
            known = [] if is_quick else [f"trial {number}" for number in range(deaths)]
            assert [stage.name for stage in service.state.restart] == known
        assert service.state.start == ()


def build_noting(folder: Path, config: EngineConfig) -> FakeDevice:
    """A rank that writes down how many autotune results it knew."""
    note = folder / f"rank {config.rank}"
    note.write_text((note.read_text() if note.exists() else "") + str(len(START.autotuned)))
    START.autotuned = (AutotuneResult("trial", (1,)),)
    return FakeDevice()


def test_all_ranks_of_the_next_engine_know_them(tmp_path):
    from tests.runtime.ranks.rank_devices import supervised_ranks  # an extension: not every run of these tests has it

    with supervised_ranks(partial(build_noting, tmp_path), timeouts=EngineTimeouts(quick_death_s=0.0)) as (service, _):
        service.wait_until_ready(TIMEOUT_S)
        os.kill(service.engine_pid, signal.SIGKILL)
        assert until(lambda: [note.read_text() for note in tmp_path.iterdir()] == ["01", "01"])
