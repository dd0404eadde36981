"""What clients and operators see of a server with replicas that die, come, wait for a place and lose it."""

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
from rota.runtime.in_process import InProcessService
from rota.runtime.registry import Registry
from rota.runtime.replicas.router import Router
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.service import Service, ServicePhase, ServiceState
from rota.runtime.timeouts import EngineTimeouts
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.observe.scraped import Scrape
from tests.server.applications import made_app, running
from tests.server.endless import ENDLESS, endless_device, mortal_device
from tests.server.engines import configs, pids_of, processes
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

# ── processes of their own ────────────────────────────────────────────────────────────────────────────────────────────

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


# ── replicas that come ────────────────────────────────────────────────────────────────────────────────────────────────

WAITS = ServiceState(phase=ServicePhase.STARTING, reason="It needs 1 GPU, and the cluster has 0 free.", may_last=True)


class Replica(InProcessService):
    """An engine in a thread that starts when the test lets it, and waits for a place for as long as the test says."""

    def __init__(self, number: int) -> None:
        self.may_start = threading.Event()
        self.waits: ServiceState | None = None
        super().__init__(self._build, configs(None, number + 1)[-1])

    @property
    def state(self) -> ServiceState:
        return self.waits or super().state

    def start(self, deliver) -> None:
        self._tell = deliver
        super().start(deliver)

    def wait_for_place(self) -> None:
        self.waits = WAITS
        self._tell([])

    def stop(self) -> None:
        self.may_start.set()
        super().stop()

    def _build(self) -> FakeDevice:
        assert self.may_start.wait(TIMEOUT_S)
        return endless_device()


class GrowingStage:
    """A server that began with one replica and one adapter, and its replicas."""

    def __init__(self, client: httpx.Client, service: ReplicatedService, first: Replica) -> None:
        self.client, self._service, self.first = client, service, first

    def join(self) -> Replica:
        replica = Replica(len(self._service))
        self._service.add(replica)
        return replica

    def ask(self, model: str, **fields) -> httpx.Response:
        body = {"model": model, "prompt": "abc", "max_tokens": 3, **fields}
        return self.client.post("/v1/completions", json=body)

    def replicas(self) -> list[tuple[int, str, str | None]]:
        listed = self.client.get("/server_info").json()["replicas"]
        return [(one["engine"], one["status"], one["reason"]) for one in listed]

    def scrape(self) -> Scrape:
        return Scrape(self.client.get("/metrics").text)


@pytest.fixture
def growing(tmp_path) -> Iterator[GrowingStage]:
    registry, first = Registry("letters", str(tmp_path)), Replica(0)
    adapters = [registry.add(LoraPath(name="poet", path="/adapters/poet"))]
    replicated = ReplicatedService([first], Router(1, "round-robin"))
    service = EngineClient(replicated, adapters)
    app = made_app(service, Tokenizer(write_byte_tokenizer(tmp_path / "model")), registry)
    with running(app) as url, httpx.Client(base_url=url) as client:
        yield GrowingStage(client, replicated, first)


def test_a_replica_that_joins_is_seen_by_operators_at_once_and_serves_when_it_is_ready(growing):
    growing.first.may_start.set()
    assert until(lambda: growing.client.get("/readyz").status_code == 200)
    newcomer = growing.join()
    newcomer.wait_for_place()
    assert growing.replicas() == [(0, "ready", None), (1, "starting", WAITS.reason)]
    ready = growing.client.get("/readyz")
    assert (ready.status_code, ready.json()["reason"]) == (200, f"Replica 1 waits: {WAITS.reason}")
    scrape = growing.scrape()
    assert [scrape("rota_engine_up", engine=engine) for engine in "01"] == [1, 0]
    assert scrape("rota_engine_restarts_total", engine="1") == 0, "it counts from zero"
    assert growing.client.post("/load_lora_adapter", json={"lora_name": "owl", "lora_path": "/owl"}).status_code == 200

    newcomer.waits = None
    newcomer.may_start.set()
    assert until(lambda: [status for _, status, _ in growing.replicas()] == ["ready", "ready"])
    assert {growing.ask("letters").status_code for _ in range(2)} == {200}  # in turn
    assert growing.scrape()("rota_requests_routed_total", engine="1", reason="in_turn") == 1
    assert {growing.ask(name).status_code for name in ("poet", "owl") * 3} == {200}
    assert growing.client.post("/unload_lora_adapter", json={"lora_name": "poet"}).status_code == 200
    assert {growing.ask("poet").status_code for _ in range(3)} == {404}


def test_an_open_request_says_which_replica_has_it_and_why(growing):
    growing.first.may_start.set()
    growing.join().may_start.set()
    assert until(lambda: [status for _, status, _ in growing.replicas()] == ["ready", "ready"])
    body = {"prompt": "abc", "max_tokens": ENDLESS, "stream": True, "n": 2}
    with growing.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: the end of an iterator closes the connection
        next(lines)
        told = growing.client.get(f"/v1/requests/{stream.headers['x-request-id']}").json()

    routes = [(one["replica"], one["route"]) for one in told["requests"]]
    assert routes == [(replica, "requests go to the replicas in turn") for replica in (0, 1)]
    assert (told["replica"], told["route"]) in routes  # that of the request which is furthest behind


def test_a_server_without_a_place_answers_503_with_the_reason_and_does_not_let_requests_wait(growing):
    with_answer: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: with_answer.append(growing.ask("letters")))
    waiting.start()
    assert until(lambda: bool(growing._service._desk._at))
    growing.first.wait_for_place()
    waiting.join(TIMEOUT_S)
    answers = [*with_answer, growing.ask("letters"), growing.ask("letters", stream=True)]
    assert [(one.status_code, one.json()["error"]["message"]) for one in answers] == [(503, WAITS.reason)] * 3
    ready = growing.client.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"status": "starting", "reason": WAITS.reason})
    assert growing.client.get("/livez").status_code == 200
    assert growing.client.get("/health_generate").json()["reason"] == WAITS.reason

    growing.first.waits = None
    growing.first.may_start.set()
    assert until(lambda: growing.client.get("/readyz").status_code == 200)
    assert {growing.ask(name).status_code for name in ("letters", "poet")} == {200}
