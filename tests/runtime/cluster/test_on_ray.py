"""Three replicas on a real Ray cluster of three nodes, all on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError, EngineDiedError
from rota.core.events import FinishReason, Produced
from rota.runtime.cluster.face import ray_service
from rota.runtime.service import ServicePhase
from tests.builders import abort, submit
from tests.fakes import continuation, endings, outputs
from tests.processes import is_alive
from tests.runtime.cluster.clusters import (
    RayNodes,
    all_serve,
    ask,
    config_on,
    drivers,
    failed,
    free_again,
    ray_nodes,
    served,
    slow_device,
)
from tests.runtime.services import LONG, Listener
from tests.waiting import until


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(3) as found:
        yield found


def test_replicas_on_ray_serve_and_one_that_is_killed_is_placed_again():
    with ray_nodes(2) as nodes:
        with served(nodes, data_parallel_size=2) as (service, listener):
            pids = [one.engine_pid for one in service.state.engines]
            assert len(set(pids)) == 2
            names = ask(service, listener, 6, tokens=LONG)

            os.kill(pids[0], signal.SIGKILL)

            assert until(lambda: len(endings(listener.events)) == 3)
            lost = endings(listener.events)
            assert {one.fault.message.split(".")[0] for one in lost.values()} == {
                "The engine process was killed by SIGKILL"
            }
            for name in {*names} - {*lost}:
                service.send(abort(name))
                assert listener.wait_for_ending(name).reason is FinishReason.ABORT
                given = outputs(listener.events)[name]
                assert given == continuation(submit(name).prompt, len(given))
            assert until(lambda: all_serve(service, 2))
            (name,) = ask(service, listener, 1, "later")
            assert listener.wait_for_ending(name).reason is FinishReason.LENGTH
        assert until(lambda: nodes.engines() == [])
        assert free_again(nodes, 2)


@pytest.mark.long("a cluster of its own, whose nodes are killed and added: 60 seconds")
def test_a_node_that_is_killed_ends_its_own_requests_and_its_replica_waits_for_another_node():
    with ray_nodes(3) as nodes, served(nodes) as (service, listener):
        names = ask(service, listener, 9)
        nodes.remove(0)
        lost = failed(listener, names)
        assert len(lost) == 3
        assert all("of the Ray cluster" in message for message in lost), lost

        assert until(lambda: "has no place to run: it needs 1 CPU on one machine" in service.state.reason)
        assert service.state.phase is ServicePhase.READY
        assert sorted(one.phase for one in service.state.engines) == [
            ServicePhase.READY,
            ServicePhase.READY,
            ServicePhase.STARTING,
        ]
        assert failed(listener, ask(service, listener, 6, "meanwhile")) == []

        nodes.add()
        assert until(lambda: all_serve(service))
        assert failed(listener, ask(service, listener, 9, "again")) == []
        service.stop()
        assert until(lambda: nodes.engines() == [])
        assert free_again(nodes)


@pytest.mark.long("further starts of replicas: 30 seconds")
def test_an_actor_that_is_killed_ends_its_own_requests_and_is_placed_again(nodes):
    with served(nodes) as (service, listener):
        names = ask(service, listener, 9)
        victim = service.state.engines[1].engine_pid
        os.kill(parent_of(victim), signal.SIGKILL)

        assert len(failed(listener, names)) == 3
        assert until(lambda: not is_alive(victim))
        assert until(lambda: all_serve(service))
    assert until(lambda: nodes.engines() == [])
    assert free_again(nodes)


@pytest.mark.long("further starts of replicas: 40 seconds")
def test_a_driver_that_is_killed_ends_all_engines_and_another_one_places_them_again(nodes, caplog):
    with served(nodes) as (service, listener):
        names = ask(service, listener, 3)
        before = nodes.engines()
        (driver,) = drivers()
        os.kill(driver, signal.SIGKILL)

        assert len(failed(listener, names)) == 3
        assert until(lambda: not any(map(is_alive, before)))
        assert until(lambda: all_serve(service))
        assert failed(listener, ask(service, listener, 3, "again")) == []
    assert [record.message for record in caplog.records if record.name == "rota.cluster"] == [
        "The Ray cluster is gone.",
        "The Ray cluster is back.",
    ]
    assert drivers() == []
    assert free_again(nodes)


@pytest.mark.long("a cluster of its own that grows: 50 seconds")
def test_a_service_grows_with_its_cluster_and_never_shrinks():
    with ray_nodes(1) as nodes, served(nodes, data_parallel_size="auto") as (service, listener):
        assert all_serve(service, 1)
        names = ask(service, listener, 2)

        for replicas in (2, 3):
            nodes.add()
            assert until(lambda replicas=replicas: all_serve(service, replicas))
        assert failed(listener, names) == []
        names = ask(service, listener, 6, "more")
        assert Counter(replica_of(listener, name) for name in names) == {0: 2, 1: 2, 2: 2}

        nodes.remove(0)
        assert until(lambda: "has no place to run" in service.state.reason)
        nodes.add()
        assert until(lambda: all_serve(service, 3)), "the new node is the place of the replica that had lost its own"
        service.stop()
        assert free_again(nodes)


@pytest.mark.long("further starts of drivers: 20 seconds")
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            {"data_parallel_size": 4},
            "4 replicas are asked for, and each needs 1 CPU on one machine; the cluster has 1 CPU on ",
        ),
        ({"device": "cuda"}, "3 replicas are asked for, and each needs 1 GPU on one machine; the cluster has no GPU."),
        (
            {"data_parallel_size": 1, "cpu_threads": 2},
            "One replica needs 2 CPUs on one machine; the cluster has 1 CPU on ",
        ),
    ],
)
def test_a_cluster_that_does_not_fit_is_refused_soon(nodes, model, sentence):
    with pytest.raises(ConfigError, match=rf"does not fit\. {sentence}"):
        ray_service(config_on(nodes, **model), ServerConfig(), slow_device, fit_s=0.2)
    assert drivers() == []


@pytest.mark.long("a further cluster: 30 seconds")
def test_a_node_with_another_version_is_refused_before_it_reads_the_job(tmp_path):
    (tmp_path / "flashinfer_python-0.1.dist-info").mkdir()
    (tmp_path / "flashinfer_python-0.1.dist-info" / "METADATA").write_text("Name: flashinfer-python\nVersion: 0.1\n")
    paths = os.pathsep.join([*filter(None, sys.path), str(tmp_path)])
    with ray_nodes(1, environ={"PYTHONPATH": paths}) as nodes:
        service = ray_service(config_on(nodes, data_parallel_size=1), ServerConfig(), slow_device)
        service.start(Listener())
        with pytest.raises(
            EngineDiedError,
            match=r"node .* has 0\.1 for the version of flashinfer-python, and the front has nothing",
        ):
            service.wait_until_ready()
        service.stop()
        assert free_again(nodes, 1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def replica_of(listener, name: str) -> int:
    return next(e.engine_id for e in listener.events if isinstance(e, Produced) and name in e.request_ids)
