"""The head of a Ray cluster ends: with Ray's own fault tolerance it comes back, and without it the cluster is gone."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rota.runtime.service import ServicePhase
from tests.processes import is_alive, started
from tests.runtime.cluster.clusters import all_serve, ask, drivers, failed, free_again, ray_nodes, served
from tests.waiting import until

REDIS = shutil.which("redis-server")
# Ray's own limit is a minute.
GONE_S = 5


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@contextmanager
def redis() -> Iterator[str]:
    """The address of a server that keeps nothing on a disk."""
    port = free_port()
    with started([REDIS, "--port", str(port), "--save", "", "--appendonly", "no"]):
        assert until(lambda: is_open(port))
        yield f"127.0.0.1:{port}"


def is_open(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long("a cluster of its own, whose head restarts: 50 seconds")
@pytest.mark.skipif(REDIS is None, reason="Ray keeps a head's state in Redis, and redis-server is not installed here")
def test_with_rays_fault_tolerance_replicas_serve_while_the_head_restarts_and_are_placed_again_afterwards():
    with redis() as address, ray_nodes(3, environ={"RAY_REDIS_ADDRESS": address}) as nodes:
        with served(nodes) as (service, listener):
            engines = [one.engine_pid for one in service.state.engines]
            names = ask(service, listener, 3)
            nodes.stop_head()
            assert failed(listener, names) == []
            assert failed(listener, ask(service, listener, 6, "headless")) == []
            assert service.state.phase is ServicePhase.READY

            nodes.start_head()
            assert failed(listener, ask(service, listener, 6, "again")) == []
            assert [one.engine_pid for one in service.state.engines] == engines
            assert all(map(is_alive, engines))

            nodes.remove(0)
            assert until(lambda: not all_serve(service))
            nodes.add()
            assert until(lambda: all_serve(service)), "the head that has restarted places replicas"
        assert until(lambda: nodes.engines() == [])
        assert free_again(nodes)


@pytest.mark.long("two clusters, one after the other: 60 seconds")
def test_without_it_the_front_says_that_the_cluster_is_gone_and_serves_again_on_the_next_one(caplog):
    port = free_port()
    settings = {"gcs_rpc_server_reconnect_timeout_s": GONE_S}
    with ray_nodes(3, port, **settings) as nodes:
        stack = served(nodes)
        service, listener = stack.__enter__()
        assert failed(listener, ask(service, listener, 3)) == []
        nodes.stop_head()
        assert until(lambda: service.state.phase is ServicePhase.STARTING)
        assert until(lambda: f"The Ray cluster at {nodes.address} is gone" in service.state.reason)
        assert until(lambda: nodes.engines() == []), "engines end with their cluster"
    try:
        with ray_nodes(3, port, **settings) as nodes:
            assert until(lambda: all_serve(service))
            assert failed(listener, ask(service, listener, 3, "again")) == []
            service.stop()
            assert until(lambda: nodes.engines() == [])
            assert free_again(nodes)
    finally:
        stack.__exit__(None, None, None)
    assert drivers() == []
    said = [record.message for record in caplog.records if record.name == "rota.cluster"]
    assert said[-2:] == ["The Ray cluster is gone.", "The Ray cluster is back."]
