"""What clients and operators see of a server whose replicas come, wait for a place and lose it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from rota.core.lora_paths import LoraPath
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.runtime.replicas.router import Router
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.service import ServicePhase, ServiceState
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.in_process import InProcessService
from tests.observe.scraped import Scrape
from tests.server.applications import made_app
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import configs
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

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


class Stage:
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
def stage(tmp_path) -> Iterator[Stage]:
    registry, first = Registry("letters", str(tmp_path)), Replica(0)
    adapters = [registry.add(LoraPath(name="poet", path="/adapters/poet"))]
    replicated = ReplicatedService([first], Router(1, "round-robin"))
    service = EngineClient(replicated, adapters)
    app = made_app(service, Tokenizer(write_byte_tokenizer(tmp_path / "model")), registry)
    with running(app) as url, httpx.Client(base_url=url) as client:
        yield Stage(client, replicated, first)


def test_a_replica_that_joins_is_seen_by_operators_at_once_and_serves_when_it_is_ready(stage):
    stage.first.may_start.set()
    assert until(lambda: stage.client.get("/readyz").status_code == 200)
    newcomer = stage.join()
    newcomer.wait_for_place()
    assert stage.replicas() == [(0, "ready", None), (1, "starting", WAITS.reason)]
    ready = stage.client.get("/readyz")
    assert (ready.status_code, ready.json()["reason"]) == (200, f"Replica 1 waits: {WAITS.reason}")
    scrape = stage.scrape()
    assert [scrape("rota_engine_up", engine=engine) for engine in "01"] == [1, 0]
    assert scrape("rota_engine_restarts_total", engine="1") == 0, "it counts from zero"
    assert stage.client.post("/load_lora_adapter", json={"lora_name": "owl", "lora_path": "/owl"}).status_code == 200

    newcomer.waits = None
    newcomer.may_start.set()
    assert until(lambda: [status for _, status, _ in stage.replicas()] == ["ready", "ready"])
    assert {stage.ask("letters").status_code for _ in range(2)} == {200}  # in turn
    assert stage.scrape()("rota_requests_routed_total", engine="1", reason="in_turn") == 1
    assert {stage.ask(name).status_code for name in ("poet", "owl") * 3} == {200}
    assert stage.client.post("/unload_lora_adapter", json={"lora_name": "poet"}).status_code == 200
    assert {stage.ask("poet").status_code for _ in range(3)} == {404}


def test_an_open_request_says_which_replica_has_it_and_why(stage):
    stage.first.may_start.set()
    stage.join().may_start.set()
    assert until(lambda: [status for _, status, _ in stage.replicas()] == ["ready", "ready"])
    body = {"prompt": "abc", "max_tokens": ENDLESS, "stream": True, "n": 2}
    with stage.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: the end of an iterator closes the connection
        next(lines)
        told = stage.client.get(f"/v1/requests/{stream.headers['x-request-id']}").json()

    routes = [(one["replica"], one["route"]) for one in told["requests"]]
    assert routes == [(replica, "requests go to the replicas in turn") for replica in (0, 1)]
    assert (told["replica"], told["route"]) in routes  # that of the request which is furthest behind


def test_a_server_without_a_place_answers_503_with_the_reason_and_does_not_let_requests_wait(stage):
    with_answer: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: with_answer.append(stage.ask("letters")))
    waiting.start()
    assert until(lambda: bool(stage._service._desk._at))
    stage.first.wait_for_place()
    waiting.join(TIMEOUT_S)
    answers = [*with_answer, stage.ask("letters"), stage.ask("letters", stream=True)]
    assert [(one.status_code, one.json()["error"]["message"]) for one in answers] == [(503, WAITS.reason)] * 3
    ready = stage.client.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"status": "starting", "reason": WAITS.reason})
    assert stage.client.get("/livez").status_code == 200
    assert stage.client.get("/health_generate").json()["reason"] == WAITS.reason

    stage.first.waits = None
    stage.first.may_start.set()
    assert until(lambda: stage.client.get("/readyz").status_code == 200)
    assert {stage.ask(name).status_code for name in ("letters", "poet")} == {200}
