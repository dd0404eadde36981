"""`rota serve --data-parallel-backend ray`: what a client sees, what an operator reads, and what is left of it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.commands import ray_server
from tests.processes import PIPE, Program, run_program, started
from tests.runtime.cluster.clusters import RayNodes, free_again, ray_nodes
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of, until

ROTA = Path(sys.executable).with_name("rota")
PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextmanager
def server_on(nodes: RayNodes, folder: Path, *flags: str) -> Iterator[tuple[Program, str]]:
    model = write_byte_tokenizer(folder / "tiny")
    command = [sys.executable, ray_server.__file__, model, "--port", "0", "--cpu-threads", "1"]
    command += ["--data-parallel-backend", "ray", "--ray-address", nodes.address, *flags]
    with started(command, stderr=PIPE, env=os.environ | PATHS) as server:
        yield server, line_of(server, "Rota serves").split()[-1]


def ask(url: str, tokens: int = 4) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": tokens})


def running(url: str) -> int:
    states = httpx.get(f"{url}/server_info").json()["internal_states"]
    return sum(state["num_running_reqs"] for state in states)


@pytest.mark.long("a cluster, and a front that is killed and started again: 60 seconds")
def test_a_front_that_is_killed_under_load_leaves_nothing_and_the_next_one_serves(tmp_path):
    with ray_nodes(3) as nodes, ThreadPoolExecutor(4) as clients:
        with server_on(nodes, tmp_path, "--data-parallel-size", "auto") as (server, url):
            assert line_of(server, "3 replicas") == "3 replicas of the model share the requests.\n"
            assert ask(url).json()["choices"][0]["text"] == "defg"
            asked = [clients.submit(ask, url, 150) for _ in range(4)]
            assert until(lambda: running(url) == 4)
            engines = nodes.engines()
            assert len(engines) == 3
            server.kill()
            assert all(isinstance(one.exception(TIMEOUT_S), httpx.HTTPError) for one in asked)
        assert until(lambda: nodes.engines() == [])
        assert free_again(nodes)

        with server_on(nodes, tmp_path, "--data-parallel-size", "3") as (server, url):
            assert ask(url).json()["choices"][0]["text"] == "defg"
            server.send_signal(signal.SIGTERM)
            assert server.wait(TIMEOUT_S) == 0
            assert server.stderr is not None
            assert "ray" not in server.stderr.read().lower(), "Ray's own lines are not the server's"
        assert nodes.engines() == []
        assert free_again(nodes)


@pytest.mark.long("the built-in model on three nodes: 90 seconds")
def test_the_built_in_model_serves_on_three_nodes_and_a_cluster_that_is_gone_makes_the_server_not_ready():
    flags = ["--port", "0", "--cpu-threads", "1", "--data-parallel-size", "3", "--kv-blocks", "64", "--quiet"]
    with ray_nodes(3, gcs_rpc_server_reconnect_timeout_s=5) as nodes:
        command = [ROTA, "serve", *flags, "--data-parallel-backend", "ray", "--ray-address", nodes.address]
        with started(command, env=os.environ | PATHS) as server:
            url = line_of(server, "Rota serves", within_s=240.0).split()[-1]
            body = {"model": "pirate", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert len(httpx.get(f"{url}/server_info").json()["replicas"]) == 3

            nodes.stop_head()
            assert until(lambda: httpx.get(f"{url}/readyz").status_code == 503)
            assert until(lambda: "is gone" in httpx.get(f"{url}/readyz").json().get("reason", ""))
            assert httpx.get(f"{url}/livez").status_code == 200


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--ray-address", "127.0.0.1:1"], "The Ray cluster at 127.0.0.1:1 cannot be joined"),
        (["--ray-address", "ray://127.0.0.1:1"], "ray_address is 'ray://127.0.0.1:1', but must be HOST:PORT or 'auto'"),
    ],
)
def test_a_cluster_that_is_not_there_ends_the_server_with_one_sentence(tmp_path, flags, sentence):
    model = write_byte_tokenizer(tmp_path / "tiny")
    command = [ROTA, "serve", model, "--port", "0", "--data-parallel-backend", "ray", *flags]
    done = run_program(command, check=False, env=os.environ | PATHS)

    assert done.returncode == 2
    assert done.stderr.startswith(f"rota: {sentence}")
    assert "ray start --head" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_address_without_the_backend_is_refused():
    done = run_program([ROTA, "serve", "--ray-address", "auto"], check=False, env=os.environ | PATHS)

    assert (done.returncode, done.stderr) == (
        2,
        "rota: ray_address is 'auto', but replicas run on this machine; leave it out, or add "
        "--data-parallel-backend ray.\n",
    )
