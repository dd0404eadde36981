"""Everything at once for a minute: requests, aborts, adapters that come and go, replicas that join and die."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial

import pytest

from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, EngineRestarted
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, Explain, Inspect, RemoveAdapter
from rota.core.tenant import Tenant
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.service import ServicePhase
from rota.runtime.supervisor import SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice, endings
from tests.processes import is_alive
from tests.runtime.services import Listener
from tests.server.engines import configs, pids_of
from tests.waiting import until

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
