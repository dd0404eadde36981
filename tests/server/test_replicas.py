"""What clients and operators see of a server with two replicas, in processes of their own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.lora_paths import LoraPath
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.runtime.timeouts import EngineTimeouts
from rota.text.tokenizer import Tokenizer
from tests.observe.scraped import Scrape
from tests.server.applications import made_app
from tests.server.endless import ENDLESS, mortal_device
from tests.server.engines import pids_of, processes
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

ADAPTERS = ("pirate", "poet", "owl")


class Stage:
    """A server with two replicas and three adapters."""

    def __init__(self, client: httpx.Client, service: Service, folder: Path) -> None:
        self.client, self.folder = client, folder
        self._service = service

    def ask(self, model: str, max_tokens: int = 3) -> httpx.Response:
        body = {"model": model, "prompt": "abc", "max_tokens": max_tokens}
        return self.client.post("/v1/completions", json=body)

    def replicas(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.client.get("/server_info").json()["replicas"]
        return listed

    def statuses(self) -> list[str]:
        return [replica["status"] for replica in self.replicas()]

    def scrape(self) -> Scrape:
        return Scrape(self.client.get("/metrics").text)

    def kill(self, number: int) -> None:
        os.kill(pids_of(self._service)[number], signal.SIGKILL)


@pytest.fixture
def stage(tmp_path) -> Iterator[Stage]:
    registry = Registry("letters", str(tmp_path))
    adapters = [registry.add(LoraPath(name=name, path=f"/adapters/{name}")) for name in ADAPTERS]
    timeouts = EngineTimeouts(quick_deaths=2, pause_s=0.01, quick_death_s=60.0)
    service = EngineClient(processes(partial(mortal_device, tmp_path), timeouts=timeouts, replicas=2), adapters)
    app = made_app(service, Tokenizer(write_byte_tokenizer(tmp_path / "model")), registry)
    with running(app) as url, httpx.Client(base_url=url) as client:
        service.wait_until_ready()
        yield Stage(client, service, tmp_path)


def check_that_both_serve(stage: Stage) -> None:
    assert {stage.ask(name).status_code for name in ("letters", *ADAPTERS)} == {200}
    first, second = stage.replicas()
    assert (first["engine"], second["engine"]) == (0, 1)
    assert {one["status"] for one in (first, second)} == {"ready"}
    assert len({first["pid"], second["pid"], None}) == 3
    assert {*first["adapters_in_slots"], *second["adapters_in_slots"]} <= {*ADAPTERS}
    info = stage.client.get("/server_info").json()
    assert info["max_running_requests"] == first["max_running_requests"] + second["max_running_requests"]
    assert len(info["internal_states"]) == 2
    scrape = stage.scrape()
    for engine in "01":
        assert scrape("rota_engine_up", engine=engine) == 1
        assert scrape("rota_kv_blocks", engine=engine) > 0
        assert scrape("rota_engine_process_resident_memory_bytes", engine=engine) > 0


def check_that_streams_of_the_living_go_on(stage: Stage) -> None:
    lines: dict[str, list[str]] = {}
    may_read = threading.Barrier(5)

    def read(name: str) -> None:
        body = {"model": name, "prompt": "abc", "max_tokens": ENDLESS, "stream": True}
        with stage.client.stream("POST", "/v1/completions", json=body) as stream:
            come = filter(None, stream.iter_lines())
            lines[name] = [next(come)]
            may_read.wait(TIMEOUT_S)
            lines[name] += come

    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(read, name) for name in ("letters", *ADAPTERS)]
        may_read.wait(TIMEOUT_S)
        stage.kill(0)
        assert until(lambda: stage.scrape()("rota_engine_restarts_total", engine="0") == 1)
        (stage.folder / "go").touch()
        for one in reading:
            one.result(TIMEOUT_S)
    whole = {name for name, got in lines.items() if '"finish_reason":"stop"' in got[-2]}
    broken = {name for name, got in lines.items() if "engine_died" in got[-2]}
    assert whole | broken == {"letters", *ADAPTERS}
    assert (whole & broken, len(whole) > 0, len(broken) > 0) == (set(), True, True)
    assert until(lambda: stage.statuses() == ["ready", "ready"])
    assert {stage.ask(name).status_code for name in ("letters", *ADAPTERS)} == {200}


def test_a_replica_that_dies_is_seen_by_operators_and_by_its_own_clients_alone_whether_it_comes_back_or_not(stage):
    check_that_both_serve(stage)
    check_that_streams_of_the_living_go_on(stage)

    (stage.folder / "go").unlink()
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(stage.ask, name, ENDLESS) for name in ("letters", *ADAPTERS) * 2]
        assert until(lambda: all(one["num_running_reqs"] for one in stage.replicas())), "both have work"
        (stage.folder / "doom").touch()
        stage.kill(1)
        assert until(lambda: stage.statuses() == ["ready", "down"])
        (stage.folder / "go").touch()
        answers = [one.result(TIMEOUT_S) for one in asked]
    codes = sorted(answer.status_code for answer in answers)
    assert codes[0] == 200
    assert codes[-1] == 503
    assert {answer.json()["error"]["code"] for answer in answers if answer.status_code == 503} == {"engine_died"}

    assert "died 2 times" in stage.replicas()[1]["reason"]
    assert [stage.client.get(path).status_code for path in ("/readyz", "/livez", "/health")] == [200, 200, 200]
    assert {stage.ask(name).status_code for name in ("letters", *ADAPTERS)} == {200}
    scrape = stage.scrape()
    assert [scrape("rota_engine_up", engine=engine) for engine in "01"] == [1, 0]
    assert [scrape("rota_engine_given_up", engine=engine) for engine in "01"] == [0, 1]
    assert scrape("rota_engine_restarts_total", engine="1") == 1
    assert (scrape("rota_adapters_loaded"), scrape("rota_adapters_lost")) == (3, 0)
    assert (scrape("rota_kv_blocks", engine="1"), scrape("rota_kv_blocks", engine="0") > 0) == (None, True)
    stage.kill(0)
    assert until(lambda: stage.client.get("/livez").status_code == 503)
