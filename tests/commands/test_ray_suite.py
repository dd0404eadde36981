"""The built-in model behind `rota serve --data-parallel-backend ray` answers as it does behind one engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.engine.folders.builtin import builtin_adapters
from tests.commands.served_calls import ADAPTERS, CALLS, answer, chat
from tests.processes import started
from tests.runtime.cluster.clusters import RayNodes, ray_nodes
from tests.waiting import TIMEOUT_S, line_of, until

ROTA = Path(sys.executable).with_name("rota")
FOLDER = str(next(iter(builtin_adapters().values())).parent)
# Clients at once, each for another adapter than the one before.
CLIENTS = 9
# One engine is asked so often for an answer that another gave.
TRIES = 12


@contextmanager
def server(*flags: str) -> Iterator[str]:
    command = [ROTA, "serve", "--port", "0", "--cpu-threads", "1", "--kv-blocks", "256", "--quiet", *flags]
    # In four bits one row and two are computed by different products, and greedy answers differ.
    command += ["--quantization", "none", "--dtype", "float32"]
    command += ["--adapter-root", FOLDER]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with started(command, env=environ) as program:
        yield line_of(program, "Rota serves", within_s=240.0).split()[-1]


@contextmanager
def on_ray(nodes: RayNodes) -> Iterator[str]:
    with server("--data-parallel-backend", "ray", "--data-parallel-size", "3", "--ray-address", nodes.address) as url:
        yield url


def is_given_too(alone: str, call: tuple[str, str, Any], found: object) -> bool:
    """Whether one engine gives the same answer at another time.

    Rows of one call share a step or do not, by the moment they come. Their logits then differ by some ten-thousandths,
    and of draws by chance a few lie so near to a border: of these calls, one (seed 3, at the third token).
    """
    return any(answer(alone, call, FOLDER) == found for _ in range(TRIES))


@pytest.mark.long("the built-in model on three nodes and beside them, and every kind of call to both: 4 minutes")
def test_every_kind_of_call_is_answered_on_three_ray_nodes_as_by_one_engine():
    with ray_nodes(3) as nodes, on_ray(nodes) as url, server() as alone:
        answers = [(call, answer(url, call, FOLDER), answer(alone, call, FOLDER)) for call in CALLS]

        others = [(call, found) for call, found, expected in answers if found != expected]
        assert [one for one in others if not is_given_too(alone, *one)] == []
        assert {status for _, (status, _), _ in answers} >= {200, 400, 404, 405, 413}
        replicas = httpx.get(f"{url}/server_info").json()["replicas"]
        assert len(replicas) == 3


@pytest.mark.long("the built-in model on three nodes, an engine killed under load: 3 minutes")
def test_all_adapters_at_once_are_answered_and_an_engine_that_dies_ends_only_its_own_requests():
    def ask(number: int, url: str) -> int:
        method, path, body = chat("Tell a story.", model=ADAPTERS[number % len(ADAPTERS)], max_tokens=40)
        return httpx.request(method, url + path, json=body).status_code

    def running(url: str) -> list[int]:
        info = httpx.get(f"{url}/server_info").json()
        return [state["num_running_reqs"] for state in info["internal_states"]]

    with ray_nodes(3) as nodes, on_ray(nodes) as url, ThreadPoolExecutor(CLIENTS) as clients:
        assert list(clients.map(ask, range(CLIENTS), [url] * CLIENTS)) == [200] * CLIENTS

        asked = [clients.submit(ask, number, url) for number in range(CLIENTS)]
        assert until(lambda: all(running(url)))
        os.kill(nodes.engines()[0], 9)
        statuses = [one.result(TIMEOUT_S) for one in asked]
        assert statuses.count(200) >= CLIENTS // 3, statuses
        assert set(statuses) <= {200, 500, 503}, statuses
        assert until(lambda: len(nodes.engines()) == 3)
        assert until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        assert list(clients.map(ask, range(CLIENTS), [url] * CLIENTS)) == [200] * CLIENTS
