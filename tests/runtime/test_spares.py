"""A spare process becomes the engine when one dies, and whatever is wrong with it harms nobody."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from rota.core.config import EngineConfig
from rota.core.events import EngineRestarted, FinishReason
from rota.core.ids import EngineId
from rota.core.stages import Stage
from rota.runtime.children import freeze_heap
from rota.runtime.process import EngineProcess
from rota.runtime.service import ServicePhase
from rota.runtime.spares import Spare, Spares, settling
from rota.runtime.supervisor import SupervisedService
from rota.start import START
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice, continuation, outputs
from tests.processes import is_alive, started
from tests.runtime.services import LONG, SLOW, Listener, supervised
from tests.waiting import TIMEOUT_S, hang, line_of, until


@contextmanager
def spared(
    build: Callable[[], FakeDevice] = SLOW, prepare: Callable[[], None] = gc.collect
) -> Iterator[tuple[SupervisedService, Listener, Spares]]:
    """A service that serves, and its spares, of which the first has been started."""
    spares = Spares(lambda _: prepare, settle_s=0.0)
    with supervised(build, new_engine=partial(EngineProcess, spares=spares)) as (service, listener):
        service.wait_until_ready(TIMEOUT_S)
        assert until(lambda: spares.spare is not None)
        yield service, listener, spares


def waiting(spares: Spares) -> int:
    """The process of the spare, once it has done its imports."""
    assert until(lambda: spares.spare is not None and spares.spare.is_prepared)
    return spares.spare.process.pid


def serve_again(service: SupervisedService, listener: Listener, name: str) -> int:
    """Kill the engine; returns the process of the engine that serves the next request."""
    before = service.engine_pid
    os.kill(before, signal.SIGKILL)
    assert until(lambda: service.engine_pid != before)
    asked = submit(name, max_new_tokens=5)
    service.send(asked)
    assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
    assert outputs(listener.events)[name] == continuation(asked.prompt, 5)
    return service.engine_pid


def test_a_spare_takes_over_from_an_engine_that_is_killed_under_load_and_the_next_from_the_next():
    with spared() as (service, listener, spares):
        service.send(add_adapter(1))
        service.send(submit("lost", max_new_tokens=LONG))
        listener.wait_for_tokens("lost", 2)
        first = waiting(spares)

        assert serve_again(service, listener, "again") == first
        assert "killed by SIGKILL" in listener.wait_for_ending("lost").fault.message
        second = waiting(spares)
        assert serve_again(service, listener, "once more") == second != first
        restart, _ = [event for event in listener.events if isinstance(event, EngineRestarted)]
        assert "killed by SIGKILL" in restart.reason


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_that_was_killed_or_stopped_is_not_used(number):
    with spared() as (service, listener, spares):
        spare = waiting(spares)
        os.kill(spare, number)

        assert serve_again(service, listener, "again") != spare
        assert not is_alive(spare)
        assert waiting(spares) not in (spare, service.engine_pid)


def test_a_spare_that_has_not_done_its_imports_is_not_used_and_does_not_go_on(caplog):
    caplog.set_level("INFO")
    with spared(prepare=hang) as (service, listener, spares):
        spare = spares.spare.process.pid

        assert serve_again(service, listener, "again") != spare
        assert not is_alive(spare)
    [line] = [record for record in caplog.records if record.getMessage() == "The spare process is not used."]
    assert line.fields == {"pid": spare, "why": "it has not done its imports"}


def test_imports_that_fail_are_left_to_the_engine():
    with spared(prepare=partial(int, "not a number")) as (service, listener, spares):
        spare = waiting(spares)

        assert serve_again(service, listener, "again") == spare


def test_a_spare_that_dies_between_its_answer_and_its_orders_does_not_begin():
    spare = Spare(gc.collect)
    assert until(lambda: spare.is_prepared)
    assert spare.answers()
    spare.process.kill()
    spare.process.join()

    assert not spare.begin(print)
    spare.end()


@pytest.mark.parametrize("prepare", [gc.collect, hang])
def test_nothing_is_left_running_when_the_service_stops(prepare):
    with spared(prepare=prepare) as (service, _, spares):
        engine, spare = service.engine_pid, spares.spare.process.pid
        service.stop()

        assert service.state.phase is ServicePhase.DOWN
        assert not is_alive(engine)
        assert not is_alive(spare)
        assert spares.spare is None


def test_a_spare_that_is_not_due_yet_delays_no_restart_and_no_end():
    spares = Spares(lambda _: gc.collect, settle_s=1000.0)
    with supervised(SLOW, new_engine=partial(EngineProcess, spares=spares)) as (service, listener):
        service.wait_until_ready(TIMEOUT_S)

        assert serve_again(service, listener, "again")
        assert spares.spare is None


def test_an_engine_that_stays_down_has_no_spare():
    with spared() as (service, _, spares):
        spare = waiting(spares)
        service._new_engine = partial(int, "not a number")
        os.kill(service.engine_pid, signal.SIGKILL)

        assert until(lambda: service.state.phase is ServicePhase.DOWN)
        assert until(lambda: not is_alive(spare))


def test_an_engine_that_was_a_spare_is_like_any_other():
    def score(pid: int) -> str:
        return Path(f"/proc/{pid}/oom_score_adj").read_text().strip()

    with spared() as (service, listener, spares):
        spare = waiting(spares)
        assert score(spare) == "1000", "if memory is short it goes first"
        os.kill(spare, signal.SIGINT)  # Ctrl-C is left to the server
        assert serve_again(service, listener, "again") == spare

        assert score(spare) == score(os.getpid())
        nice = [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path(f"/proc/{spare}/task").iterdir()]
        assert {*nice} == {os.getpriority(os.PRIO_PROCESS, 0)}


def build_dated() -> FakeDevice:
    return FakeDevice(stages=(Stage("began", START.began_at(), 1.0),))


def test_a_restart_counts_from_the_orders_of_the_spare():
    with spared(build_dated) as (service, listener, spares):
        waiting(spares)
        before = service.state.start[0].began_s
        sent_at = time.monotonic()
        serve_again(service, listener, "again")

        assert before < sent_at < service.state.restart[0].began_s


def build_late(gate: Path) -> FakeDevice:
    until(gate.exists)
    return FakeDevice()


@contextmanager
def two_engines(*builds: Callable[[], FakeDevice]) -> Iterator[tuple[list[SupervisedService], Listener, Spares]]:
    """Two services that share their spares."""
    spares, listener = Spares(lambda _: gc.collect, settle_s=0.0), Listener()
    new_engine = partial(EngineProcess, spares=spares)
    services = [
        SupervisedService(build, EngineConfig(engine_id=EngineId(number)), new_engine=new_engine)
        for number, build in enumerate(builds)
    ]
    for service in services:
        service.start(listener)
    try:
        yield services, listener, spares
    finally:
        for service in services:
            service.stop()


def test_no_spare_starts_while_an_engine_does(tmp_path):
    gate = tmp_path / "gate"
    with two_engines(SLOW, partial(build_late, gate)) as (services, listener, spares):
        services[0].wait_until_ready(TIMEOUT_S)
        services[0].send(submit("a"))
        listener.wait_for_ending("a")
        assert spares.spare is None
        gate.touch()
        waiting(spares)

        gate.unlink()
        os.kill(services[1].engine_pid, signal.SIGKILL)
        assert until(lambda: services[1].state.phase is ServicePhase.STARTING)
        assert serve_again(services[0], listener, "b")
        assert spares.spare is None, "the other engine starts"
        gate.touch()
        waiting(spares)


def test_of_two_engines_that_die_at_once_one_gets_the_spare_and_it_outlives_the_other():
    with two_engines(SLOW, SLOW) as (services, listener, spares):
        spare, before = waiting(spares), [service.engine_pid for service in services]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert until(lambda: all(service.state.engine_pid not in (None, *before) for service in services))
        heirs = [service for service in services if service.engine_pid == spare]
        assert len(heirs) == 1
        waiting(spares)

        for service in services:
            if service not in heirs:
                service.stop()
        heirs[0].send(submit("last"))
        assert listener.wait_for_ending("last").reason is FinishReason.LENGTH
        assert heirs[0].engine_pid == spare


PARENT = """
import gc
from functools import partial
from rota.core.config import EngineConfig
from rota.runtime.process import EngineProcess
from rota.runtime.spares import Spares, settling
from rota.runtime.supervisor import SupervisedService
from tests.fakes import FakeDevice
from tests.runtime.services import Listener
from tests.waiting import hang, until
if __name__ == "__main__":
    spares = Spares(lambda _: gc.collect, settle_s=0.0)
    service = SupervisedService(FakeDevice, EngineConfig(), new_engine=partial(EngineProcess, spares=spares))
    service.start(Listener())
    service.wait_until_ready()
    until(lambda: spares.spare and spares.spare.is_prepared)
    print(spares.spare.process.pid, flush=True)
    hang()
"""


def test_a_spare_dies_with_its_server_also_while_it_is_stopped_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    with started([sys.executable, tmp_path / "parent.py"], env=environment) as parent:
        spare = int(line_of(parent))
        os.kill(spare, signal.SIGSTOP)
        parent.kill()

        assert until(lambda: not is_alive(spare)), "the spare has outlived its server"
        assert [file.name for file in tmp_path.iterdir()] == ["parent.py"]


def test_a_spare_starts_at_once_where_its_imports_take_no_core_from_the_engines():
    assert settling(2) > 5.0
    assert settling(16) <= 1.0


@pytest.mark.parametrize(("quota", "settles_as"), [("max 100000", 16), ("200000 100000", 2)])
def test_a_spare_waits_longer_in_a_container_that_grants_few_of_many_cores(tmp_path, monkeypatch, quota, settles_as):
    monkeypatch.setattr("rota.machine.LIMITS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    (tmp_path / "cpu.max").write_text(quota)
    assert Spares(lambda _: None)._settle_s == settling(settles_as)


def test_what_exists_when_a_process_freezes_its_heap_is_never_walked_again_and_what_comes_later_is():
    kept = [[]]
    try:
        freeze_heap()
        later = [[]]
        walked = {id(one) for one in gc.get_objects()}
        assert id(kept) not in walked
        assert id(later) in walked
    finally:
        gc.unfreeze()
