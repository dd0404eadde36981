"""Replicas in processes of their own, some of which die under load."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from rota.core.errors import FaultCode, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, EngineRestarted, FinishReason, Produced
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, Explain, Inspect, RemoveAdapter
from rota.core.request import Request
from rota.core.tenant import Tenant
from rota.runtime.replicas.router import Router
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.service import BuildDevice, ServicePhase
from rota.runtime.supervisor import SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from rota.runtime.world import Device
from tests.builders import abort, add_adapter, submit
from tests.fakes import FakeDevice, FakeTicket, continuation, endings, outputs
from tests.processes import is_alive
from tests.runtime.replicas.fakes import DoomedDevice, FolderDevice
from tests.runtime.services import LONG, SLOW, Listener, heard
from tests.server.engines import configs, pids_of
from tests.waiting import until

ADAPTERS = (1, 2, 3)


@contextmanager
def replicated(
    build: BuildDevice = SLOW, replicas: int = 2, timeouts: EngineTimeouts | None = None
) -> Iterator[tuple[ReplicatedService, Listener]]:
    """Requests go to the replicas in turn."""
    engines = [SupervisedService(build, one, timeouts) for one in configs(None, replicas)]
    with heard(ReplicatedService(engines, Router(replicas, "round-robin"))) as (service, listener):
        service.wait_until_ready()
        yield service, listener


def add(service: ReplicatedService, listener: Listener, *numbers: int, path: str = "adapters/x") -> None:
    for number in numbers:
        service.send(add_adapter(number, path=path))
    for number in numbers:
        listener.wait_for_adapter(number, AdapterAdded)


def phases(service: ReplicatedService) -> list[ServicePhase]:
    return [engine.phase for engine in service.state.engines]


def all_ready(service: ReplicatedService) -> bool:
    return set(phases(service)) == {ServicePhase.READY}


def load(service: ReplicatedService, listener: Listener, prefix: str, count: int = 12) -> dict[str, Request]:
    """Requests for all adapters and the base model, by name, that run until somebody ends them."""
    asked = [
        submit(f"{prefix}{number}", max_new_tokens=LONG, adapter=AdapterId((0, *ADAPTERS)[number % 4]))
        for number in range(count)
    ]
    for message in asked:
        service.send(message)
    for message in asked[:4]:
        listener.wait_for_tokens(message.request_id)
    return {message.request_id: message for message in asked}


def lost_of(listener: Listener, names: list[str]) -> set[str]:
    """Waits until one of two replicas, which took the requests in turn, has lost all of its own and nobody else any."""
    found: set[str] = set()

    def are_those_of_one() -> bool:
        found.update({*endings(listener.events)} & {*names})
        return found in ({*names[::2]}, {*names[1::2]})

    assert until(are_those_of_one), found
    return found


def held(folder: str) -> tuple[int, int, int]:
    """How many open files, threads and temporary folders there are."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir(folder))


def test_a_replica_that_is_killed_under_load_ends_only_its_own_requests_and_comes_back_with_its_adapters(monkeypatch):
    # A folder of its own: other tests leave and take theirs meanwhile. pytest's is too long for a socket's name.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        kill_twice(folder)


def kill_twice(folder: str) -> None:
    with replicated() as (service, listener):
        add(service, listener, *ADAPTERS)
        before = held(folder)
        for round_ in range(2):
            asked = load(service, listener, f"round{round_}-")
            first, victim = pids_of(service)
            os.kill(victim, signal.SIGKILL)
            assert until(lambda: phases(service)[1] is not ServicePhase.READY)
            during = [f"during{round_}-{number}" for number in range(4)]
            for number, name in enumerate(during):
                service.send(submit(name, adapter=AdapterId(number)))

            assert {listener.wait_for_ending(name).reason for name in during} == {FinishReason.LENGTH}
            lost = lost_of(listener, list(asked))
            assert {listener.wait_for_ending(name).fault.code for name in lost} == {FaultCode.ENGINE_DIED}
            for name in {*asked} - lost:
                service.send(abort(name))
                assert listener.wait_for_ending(name).reason is FinishReason.ABORT
                given = outputs(listener.events).get(name, [])
                assert given == continuation(asked[name].prompt, len(given))
            assert until(lambda: all_ready(service))
            assert pids_of(service)[0] == first
            assert not is_alive(victim)
            # The new engine was told its adapters: two requests for each, one to each replica.
            after = [f"after{round_}-{number}-{turn}" for number in ADAPTERS for turn in "ab"]
            for name in after:
                service.send(submit(name, max_new_tokens=2, adapter=AdapterId(int(name.split("-")[1]))))
            assert {listener.wait_for_ending(name).reason for name in after} == {FinishReason.LENGTH}

        assert until(lambda: held(folder) == before), "a restart left something behind"
    restarts = [event for event in listener.events if isinstance(event, EngineRestarted)]
    assert [event.engine_id for event in restarts] == [1, 1]
    assert {event.engine_id for event in listener.events if isinstance(event, Produced)} == {0, 1}
    added = [event.adapter_id for event in listener.events if isinstance(event, AdapterAdded)]
    assert sorted(added) == [*ADAPTERS]
    assert len(endings(listener.events)) == 2 * (12 + 4 + 6)


def test_an_adapter_that_a_dying_replica_was_reading_is_refused_and_taken_from_the_other(tmp_path):
    folder = tmp_path / "slow"
    folder.mkdir()
    with replicated(FolderDevice) as (service, listener):
        service.send(add_adapter(1, path=str(folder)))
        assert until(lambda: len(list(folder.iterdir())) == 2), "both replicas read it"
        os.kill(pids_of(service)[0], signal.SIGKILL)
        assert until(lambda: phases(service)[0] is not ServicePhase.READY)
        (folder / "go").touch()

        assert "killed by SIGKILL" in listener.wait_for_adapter(1, AdapterRefused).reason
        assert until(lambda: all_ready(service))
        for name in "ab":
            service.send(submit(name, adapter=AdapterId(1)))
            assert listener.wait_for_ending(name).fault.code is FaultCode.UNKNOWN_ADAPTER
        add(service, listener, 2, path=str(folder))  # the same folder under another id
    assert not [event for event in listener.events if isinstance(event, AdapterAdded) and event.adapter_id == 1]


def test_what_is_added_and_removed_while_a_replica_starts_again_holds_there_too():
    with replicated() as (service, listener):
        add(service, listener, 1, 2)
        os.kill(pids_of(service)[1], signal.SIGKILL)
        assert until(lambda: phases(service)[1] is not ServicePhase.READY)
        service.send(RemoveAdapter(adapter_id=AdapterId(1), at=0.0))
        service.send(add_adapter(3))
        listener.wait_for_adapter(1, AdapterRemoved)
        listener.wait_for_adapter(3, AdapterAdded)
        assert until(lambda: all_ready(service))

        for name in ("gone", "gone too"):
            service.send(submit(name, adapter=AdapterId(1)))
            assert listener.wait_for_ending(name).fault.code is FaultCode.UNKNOWN_ADAPTER
        for name, number in (("a", 2), ("b", 2), ("c", 3), ("d", 3)):
            service.send(submit(name, adapter=AdapterId(number)))
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH


def gated(gate: Path) -> Device[FakeTicket]:
    """A device that is built once there is no gate."""
    assert until(lambda: not gate.exists())
    return SLOW()


def test_while_a_replica_starts_again_adapters_come_and_go_at_the_others_without_waiting_for_it(tmp_path):
    gate = tmp_path / "gate"
    with replicated(partial(gated, gate)) as (service, listener):
        add(service, listener, 1)
        gate.touch()
        os.kill(pids_of(service)[1], signal.SIGKILL)
        assert until(lambda: phases(service)[1] is ServicePhase.STARTING)

        add(service, listener, 2, 3)
        service.send(RemoveAdapter(adapter_id=AdapterId(3), at=0.0))
        listener.wait_for_adapter(3, AdapterRemoved)
        service.send(submit("at the other", adapter=AdapterId(2)))
        assert listener.wait_for_ending("at the other").reason is FinishReason.LENGTH
        assert phases(service) == [ServicePhase.READY, ServicePhase.STARTING]

        gate.unlink()
        assert until(lambda: all_ready(service))
        for number in range(4):
            service.send(submit(f"{number}", adapter=AdapterId(2)))
            assert listener.wait_for_ending(f"{number}").reason is FinishReason.LENGTH


def test_an_adapter_that_one_replica_cannot_read_again_is_served_by_the_other(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    with replicated(FolderDevice) as (service, listener):
        add(service, listener, 1, path=str(folder))
        folder.rmdir()
        os.kill(pids_of(service)[0], signal.SIGKILL)
        lost = listener.wait_for_adapter(1, AdapterRefused)
        assert isinstance(lost, AdapterRefused)
        assert (lost.others_serve, lost.engine_id) == (True, 0)
        for name in "abc":
            service.send(submit(name, adapter=AdapterId(1)))
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH

        folder.mkdir()
        os.kill(pids_of(service)[0], signal.SIGKILL)  # the next engine tries again
        assert until(lambda: not service._desk._adapters.lacking(AdapterId(1), [0, 1]))


def test_a_replica_that_keeps_dying_is_given_up_on_and_the_process_goes_on_until_the_last_one(tmp_path, caplog):
    mark = tmp_path / "doom"
    timeouts = EngineTimeouts(quick_deaths=2, pause_s=0.01, quick_death_s=60.0)
    with replicated(partial(DoomedDevice, mark), timeouts=timeouts) as (service, listener):
        add(service, listener, 1)
        mark.touch()
        os.kill(pids_of(service)[1], signal.SIGKILL)
        assert until(lambda: phases(service)[1] is ServicePhase.DOWN)
        assert service.state.phase is ServicePhase.READY
        assert "Replica 1 is down: The engine died 2 times in a row" in service.state.reason
        assert [record.fields["engine"] for record in caplog.records if record.levelname == "ERROR"] == [1]
        for name in "abc":
            service.send(submit(name, adapter=AdapterId(1)))
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
        add(service, listener, 2)
        assert not [event for event in listener.events if isinstance(event, AdapterRefused)]

        service.send(submit("last", max_new_tokens=LONG, adapter=AdapterId(2)))
        listener.wait_for_tokens("last")
        os.kill(pids_of(service)[0], signal.SIGKILL)
        assert listener.wait_for_ending("last").fault.code is FaultCode.ENGINE_DIED
        assert until(lambda: service.state.phase is ServicePhase.DOWN)
        with pytest.raises(RequestError, match="died 2 times in a row"):
            service.send(submit("late"))


def test_when_all_replicas_die_at_once_requests_wait_for_the_first_that_comes_back():
    with replicated() as (service, listener):
        service.send(submit("lost", max_new_tokens=LONG))
        listener.wait_for_tokens("lost")
        for pid in pids_of(service):
            os.kill(pid, signal.SIGKILL)
        assert until(lambda: service.state.phase is ServicePhase.STARTING)
        service.send(submit("patient"))

        assert listener.wait_for_ending("lost").fault.code is FaultCode.ENGINE_DIED
        assert listener.wait_for_ending("patient").reason is FinishReason.LENGTH


def test_a_replica_that_joins_and_dies_while_it_reads_an_adapter_comes_back_with_all(tmp_path):
    folder = tmp_path / "slow"  # the newcomer dies while it reads the adapter in here
    folder.mkdir()
    (folder / "go").touch()
    with replicated(FolderDevice, replicas=1) as (service, listener):
        add(service, listener, 1, path=str(tmp_path))
        add(service, listener, 2, path=str(folder))
        (folder / "go").unlink()
        service.add(SupervisedService(FolderDevice, configs(None, 2)[1]))
        assert until(lambda: phases(service) == [ServicePhase.READY, ServicePhase.READY])
        newcomer = pids_of(service)[1]
        assert until(lambda: (folder / str(newcomer)).exists()), "it reads the adapter"
        service.send(submit("meanwhile", adapter=AdapterId(2)))
        assert listener.wait_for_ending("meanwhile").reason is FinishReason.LENGTH
        service.send(add_adapter(3, path=str(folder)))  # which both replicas are asked for
        os.kill(newcomer, signal.SIGKILL)
        (folder / "go").touch()
        assert "killed by SIGKILL" in listener.wait_for_adapter(3, AdapterRefused).reason

        assert until(lambda: all_ready(service))
        assert until(lambda: not any(service._desk._adapters.lacking(AdapterId(one), [0, 1]) for one in (1, 2)))
        for name in ("a1", "b1", "c2", "d2"):  # one to each replica
            service.send(submit(name, adapter=AdapterId(int(name[1]))))
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
    produced = [event for event in listener.events if isinstance(event, Produced) and event.engine_id == 1]
    assert {name for event in produced for name in event.request_ids} & {"a1", "b1"}
    assert {name for event in produced for name in event.request_ids} & {"c2", "d2"}


def test_adapters_come_and_go_while_replicas_die_and_every_question_is_answered():
    """Every add is answered once, every removal is, and in the end both replicas agree on every adapter."""
    with replicated(replicas=2) as (service, listener):
        for number in range(1, 13):
            service.send(add_adapter(number))
            if number % 4 == 0:
                os.kill(pids_of(service)[number // 4 % 2], signal.SIGKILL)
                assert until(lambda: service.state.phase is ServicePhase.READY)
            if number % 3 == 0:
                service.send(RemoveAdapter(adapter_id=AdapterId(number - 1), at=0.0))
        kept = [number for number in range(1, 13) if number % 3 != 2]

        def answered(number: int) -> list[type]:
            return [type(event) for event in listener.events if getattr(event, "adapter_id", None) == number]

        kinds = (AdapterAdded, AdapterRefused, AdapterRemoved)
        assert until(lambda: all(any(kind in kinds for kind in answered(number)) for number in range(1, 13)))
        assert until(lambda: all_ready(service))
        for number in kept:
            was_added = AdapterAdded in answered(number)
            for turn in "ab":  # one to each replica
                service.send(submit(f"{number}{turn}", max_new_tokens=2, adapter=AdapterId(number)))
                ending = listener.wait_for_ending(f"{number}{turn}")
                assert (ending.reason is FinishReason.LENGTH) is was_added, ending


# ── everything at once for a minute ───────────────────────────────────────────────────────────────────────────────────

STORM_S = 60.0
TENANTS = (Tenant(name="small", max_running=3, max_queued=20), Tenant(name="large", max_running=9), Tenant(name="free"))


class Storm:
    """What was asked of a service, at random."""

    def __init__(self, service: ReplicatedService, dice: random.Random) -> None:
        self.service, self.dice = service, dice
        self.requests: list[str] = []
        self.adapters = 0
        self.removed: set[int] = set()

    def act(self) -> None:
        deeds = [self.ask] * 30 + [self.abort] * 6 + [self.load] * 2 + [self.unload, self.query]
        self.dice.choice(deeds)()

    def ask(self) -> None:
        name = f"r{len(self.requests)}"
        adapter = AdapterId(self.dice.randint(0, self.adapters))
        tenant, tokens = self.dice.choice(TENANTS), self.dice.randint(1, 30)
        message = submit(name, adapter=adapter, tenant=tenant, max_new_tokens=tokens, arrived_at=time.monotonic())
        self.service.send(message)
        self.requests.append(name)

    def abort(self) -> None:
        if self.requests:
            self.service.send(Abort(RequestId(self.dice.choice(self.requests[-20:])), time.monotonic()))

    def load(self) -> None:
        self.adapters += 1
        path = "broken" if self.dice.random() < 0.2 else "adapters/x"
        self.service.send(add_adapter(self.adapters, path=path))

    def unload(self) -> None:
        left = [number for number in range(1, self.adapters + 1) if number not in self.removed]
        if left:
            number = self.dice.choice(left)
            self.removed.add(number)
            self.service.send(RemoveAdapter(adapter_id=AdapterId(number), at=time.monotonic()))

    def query(self) -> None:
        self.service.send(Inspect(time.monotonic()))
        self.service.send(Explain(RequestId(self.dice.choice(self.requests or ["none"])), time.monotonic()))


@pytest.mark.long("a storm of a minute, in which replicas die every few seconds")
def test_whatever_happens_every_request_ends_once_and_nothing_is_left_over():
    dice = random.Random(7)
    timeouts = EngineTimeouts(quick_death_s=0.0)  # they die again and again, and must not be given up on
    engines = [SupervisedService(partial(FakeDevice, step_s=0.005), one, timeouts) for one in configs(None, 3)]
    service, listener = ReplicatedService(engines[:1]), Listener()
    service.start(listener)
    service.wait_until_ready()
    storm, pids = Storm(service, dice), {*pids_of(service)}
    for newcomer in engines[1:]:
        for _ in range(50):
            storm.act()
        service.add(newcomer)
    while service.state.engines[-1].phase is not ServicePhase.READY:  # they start in the storm
        storm.act()
        time.sleep(0.002)  # the pace of the storm
    assert until(lambda: {engine.phase for engine in service.state.engines} == {ServicePhase.READY})
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    begun_at = killed_at = time.monotonic()
    while time.monotonic() < begun_at + STORM_S:
        storm.act()
        time.sleep(0.002)  # the pace of the storm
        if time.monotonic() > killed_at + 3.0:
            killed_at = time.monotonic()
            pids |= {*pids_of(service)}
            os.kill(dice.choice(pids_of(service)), signal.SIGKILL)

    assert until(lambda: len(endings(listener.events)) == len(storm.requests)), "a request has not ended"
    assert until(lambda: {engine.phase for engine in service.state.engines} == {ServicePhase.READY})
    assert (service._desk._at, service._desk._quotas._accounts, service._desk._quotas._of) == ({}, {}, {})
    told = [event for event in listener.events if isinstance(event, AdapterAdded | AdapterRefused | AdapterRemoved)]
    assert {event.adapter_id for event in told} == {*range(1, storm.adapters + 1)}
    assert until(lambda: all(not _is_open(entry) for entry in service._desk._adapters._entries.values()))
    assert len([event for event in listener.events if isinstance(event, EngineRestarted)]) > STORM_S / 6
    # No more than before: then a start may have been about to end.
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= files), "a file is left open"
    assert until(lambda: threading.active_count() <= threads), "a thread is left"
    service.stop()
    assert not any(is_alive(pid) for pid in pids)


def _is_open(entry) -> bool:
    return entry.is_add_open or entry.is_removal_open or bool(entry.asked) or bool(entry.leaving)
