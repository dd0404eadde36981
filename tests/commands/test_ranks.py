"""A command's engines of several ranks: torchrun starts them, or each replica has its own."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from rota.commands.engines import engine_service
from rota.core.config import ServerConfig
from rota.core.errors import FaultCode
from rota.core.events import EngineRestarted, FinishReason, Produced
from rota.core.ids import RequestId
from tests.builders import abort, submit
from tests.commands import ranks_server
from tests.processes import PIPE, Program, is_alive, started
from tests.runtime.ranks.rank_devices import config_of, pid_of, slow_rank
from tests.runtime.services import LONG, Listener
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of, until

# ── torchrun ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# Below those that systems give to connections: another process would soon have the second port.
PORTS = range(20_000, 32_000, 2)


def two_free_ports() -> int:
    """The first of two neighbours: torchrun would hold it, and ranks meet at the second."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("", port))
            second.bind(("", port + 1))
            return port


@contextmanager
def torchrun(folder: Path, size: int = 2) -> Iterator[list[Program]]:
    """A process for each rank, the last rank first."""
    model, port = write_byte_tokenizer(folder / "tiny"), two_free_ports()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
    with ExitStack() as stack:
        programs = []
        for rank in reversed(range(size)):
            command = [sys.executable, ranks_server.__file__, folder, model, "--port", "0"]
            command += ["--tensor-parallel-size", str(size)]
            words = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            programs.append(stack.enter_context(started(command, stderr=PIPE, env=environment | words)))
        yield programs[::-1]


def ask(url: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 4, **fields})


def test_rank_0_serves_and_the_other_follows_through_a_restart_and_ends_with_rank_0(tmp_path):
    with torchrun(tmp_path) as (server, follower):
        url = line_of(server, "Rota serves").split()[-1]
        assert httpx.get(f"{url}/server_info").json()["tensor_parallel_size"] == 2
        assert ask(url).json()["choices"][0]["text"] == "defg"

        first = [pid_of(tmp_path, rank) for rank in range(2)]
        for victim in (0, 1):
            os.kill(pid_of(tmp_path, victim), signal.SIGKILL)
            assert until(lambda: ask(url).status_code == 200)
        assert until(lambda: not any(map(is_alive, first)))
        assert (server.poll(), follower.poll()) == (None, None)

        server.terminate()
        assert server.wait(TIMEOUT_S) == 0
        assert follower.wait(TIMEOUT_S) == 0
        assert not is_alive(pid_of(tmp_path, 1))


# ── replicas of several ranks ─────────────────────────────────────────────────────────────────────────────────────────


def replica_of(listener: Listener, name: str) -> int:
    return next(e.engine_id for e in listener.events if isinstance(e, Produced) and RequestId(name) in e.request_ids)


@pytest.mark.parametrize(
    "rank",
    [pytest.param(0, id="leader", marks=pytest.mark.long("a follower shows the same")), pytest.param(1, id="follower")],
)
def test_a_rank_that_is_killed_ends_the_requests_of_its_own_replica_alone(tmp_path, rank):
    config = config_of(2)
    config = replace(config, model=replace(config.model, data_parallel_size=2))
    service, listener = engine_service(config, ServerConfig(), partial(slow_rank, tmp_path)), Listener()
    service.start(listener)
    try:
        service.wait_until_ready()
        names = [f"r{number}" for number in range(4)]
        for name in names:
            service.send(submit(name, max_new_tokens=LONG))
            listener.wait_for_tokens(name)
        hit = {name for name in names if replica_of(listener, name) == 1}
        assert 0 < len(hit) < len(names)
        ranks = [pid_of(tmp_path, each, replica) for replica in range(2) for each in range(2)]
        os.kill(pid_of(tmp_path, rank, 1), signal.SIGKILL)

        assert {listener.wait_for_ending(name).fault.code for name in hit} == {FaultCode.ENGINE_DIED}
        for name in {*names} - hit:
            service.send(abort(name))
            assert listener.wait_for_ending(name).reason is FinishReason.ABORT
        assert [event.engine_id for event in listener.events if isinstance(event, EngineRestarted)] == [1]
        assert [is_alive(pid) for pid in ranks] == [True, True, False, False]
        assert until(lambda: is_alive(pid_of(tmp_path, rank, 1)))
    finally:
        service.stop()
    assert until(lambda: not any(is_alive(pid_of(tmp_path, each, replica)) for replica in (0, 1) for each in (0, 1)))
