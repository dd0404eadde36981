"""Metrics over HTTP: what was served, who may see it, on a port of their own, and as the endpoint picker reads them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.core.ids import AdapterId, RequestId
from rota.observe.slot_pressure import WINDOW_S, SlotPressure
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.runtime.service import ServicePhase
from rota.server.access.access import Access
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.door.door import hold_metrics_port, hold_port
from rota.server.listen import MetricsPort, listen
from rota.text.tokenizer import Tokenizer
from tests.builders import capacity
from tests.fakes import FakeDevice
from tests.observe.picker import Pod, picked
from tests.observe.scraped import Scrape
from tests.server.applications import made_app, running
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import REPLICAS, engines, threads
from tests.server.letters import CONTEXT, letters_device, serving, speaks
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import until


def read(client: httpx.Client, **headers: str) -> Scrape:
    response = client.get("/metrics", headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(response.text)


def complete(client: httpx.Client, **fields) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, **fields})


def eventually(client: httpx.Client, name: str, **labels: str) -> float:
    """The sample, once there is one: a client may know its answer before the last event has been counted."""
    assert until(lambda: read(client)(name, **labels) is not None), f"{name} {labels} never came"
    value = read(client)(name, **labels)
    assert value is not None
    return value


def test_what_was_served_can_be_scraped_per_adapter(tmp_path):
    with serving(tmp_path, adapters=("pirate",)) as client:
        complete(client)
        complete(client, model="pirate", n=2)
        scrape = read(client)

    assert scrape("rota_engine_up", engine="0") == 1
    assert scrape("rota_requests_total", adapter="base", outcome="length") == 1
    assert scrape("rota_requests_total", adapter="pirate", outcome="length") == 2
    assert scrape("rota_output_tokens_total", adapter="pirate") == 10
    assert scrape("rota_ttft_seconds_count", adapter="pirate") == 2
    assert scrape("rota_adapter_loads_total", adapter="pirate") == 1
    assert scrape("rota_requests_running", adapter="pirate") == 0
    assert (scrape("rota_slots_used", engine="0"), scrape("rota_adapters_loaded")) == (1, 1)
    assert scrape("rota_step_seconds_count", engine="0") > 0


def test_adapters_that_have_no_place_of_their_own_are_counted_together(tmp_path):
    config = ServerConfig(metrics_max_adapters=1)
    with serving(tmp_path, config=config, adapters=("pirate", "poet", "parrot")) as client:
        for name in ("pirate", "poet", "parrot"):
            complete(client, model=name)
        scrape = read(client)

    assert scrape("rota_requests_total", adapter="pirate", outcome="length") == 1
    assert scrape("rota_requests_total", adapter="other", outcome="length") == 2
    assert scrape.adapters("rota_requests_total") == {"pirate", "other"}


def test_requests_under_way_are_seen_and_a_client_that_leaves_is_an_abort(tmp_path):
    body = {"prompt": "abc", "max_tokens": ENDLESS, "stream": True}
    with serving(tmp_path, endless_device()) as client:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # it leaves when nobody holds these any more
            next(lines)
            scrape = read(client)

        assert scrape("rota_requests_running", adapter="base") == 1
        assert scrape("rota_kv_blocks_used", engine="0") > 0
        assert eventually(client, "rota_requests_total", adapter="base", outcome="abort") == 1


def test_an_answer_that_ends_at_a_stop_string_has_stopped_and_was_not_aborted(tmp_path):
    with serving(tmp_path, endless_device()) as client:
        complete(client, max_tokens=ENDLESS, stop="h")

        assert eventually(client, "rota_requests_total", adapter="base", outcome="stop") == 1
        assert read(client)("rota_requests_total", adapter="base", outcome="abort") is None


def test_a_request_that_took_too_long_has_not_stopped_by_itself(tmp_path):
    with serving(tmp_path, endless_device(), ServerConfig(request_timeout=0.3)) as client:
        assert complete(client, max_tokens=ENDLESS).status_code == 504

        assert eventually(client, "rota_requests_total", adapter="base", outcome="abort") == 1
        assert read(client)("rota_requests_total", adapter="base", outcome="stop") is None


def test_only_operators_see_everybodys_numbers(tmp_path):
    keys = KeyRing({digest_of("boss"): Key("boss"), digest_of("guest"): Key("guest", may_operate=False)})
    with serving(tmp_path, keys=keys) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"x-api-key": "guest"}).status_code == 403
        assert read(client, **{"x-api-key": "boss"})("rota_engine_up", engine="0") == 1


def test_what_keys_used_and_the_limits_they_met_can_be_scraped(tmp_path):
    keys = {"boss": Key("boss"), "secret": Key("acme", may_operate=False, requests_per_minute=3, tokens_per_minute=50)}
    ring = KeyRing({digest_of(secret): key for secret, key in keys.items()})
    with serving(tmp_path, keys=ring) as client:
        client.headers["x-api-key"] = "secret"
        statuses = [
            complete(client, n=2).status_code,
            complete(client, max_tokens=90).status_code,
            complete(client).status_code,
        ]
        scrape = read(client, **{"x-api-key": "boss"})

    assert statuses == [200, 400, 429]
    assert scrape("rota_key_requests_total", key="acme", outcome="length") == 2
    assert scrape("rota_key_requests_open", key="acme") == 0
    assert scrape("rota_key_prompt_tokens_total", key="acme") == 6
    assert scrape("rota_key_output_tokens_total", key="acme") == 10
    assert scrape("rota_key_queue_wait_seconds_count", key="acme") == 2
    assert scrape("rota_key_limits_met_total", key="acme", limit="tokens_per_minute") == 1
    assert scrape("rota_key_limits_met_total", key="acme", limit="requests_per_minute") == 1
    assert not [sample for sample in scrape.samples if "secret" in sample.labels.values()]


def test_a_server_without_keys_has_no_series_of_keys(tmp_path):
    with serving(tmp_path) as client:
        complete(client)
        scrape = read(client)

    assert [name for name in scrape.families if "key" in name] == []


def test_keys_that_have_no_place_of_their_own_are_counted_together(tmp_path):
    names = ("boss", "acme", "birds")
    ring = KeyRing({digest_of(name): Key(name) for name in names})
    with serving(tmp_path, config=ServerConfig(metrics_max_keys=1), keys=ring) as client:
        for name in names:
            client.headers["x-api-key"] = name
            complete(client)
        scrape = read(client)

    counted = {
        sample.labels["key"]: sample.value for sample in scrape.samples if sample.name == "rota_key_requests_total"
    }
    assert counted == {"boss": 1, "other": 2}


def breaks_at_ten(tokens):
    if len(tokens) == 10:
        raise ZeroDivisionError("a kernel went wrong")
    return 97


@pytest.mark.usefixtures("capsys")
def test_when_the_engine_is_down_what_is_known_is_served(tmp_path):
    service = threads(partial(FakeDevice, next_token=breaks_at_ten))
    app = made_app(service, Tokenizer(write_byte_tokenizer(tmp_path)), Registry("letters", str(tmp_path)))
    with running(app) as url, httpx.Client(base_url=url) as client:
        for _ in service.state.engines:
            assert complete(client, max_tokens=50).status_code == 503
        assert service.state.phase is ServicePhase.DOWN
        scrape = read(client)

    assert scrape("rota_engine_up", engine="0") == 0
    assert scrape("rota_requests_total", adapter="base", outcome="engine_died") == REPLICAS
    assert scrape("rota_output_tokens_total", adapter="base") > 0
    assert scrape("rota_kv_blocks", engine="0") is None


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="rota.requests")
    return caplog


def test_a_served_request_is_logged_with_its_key_its_call_and_its_adapter(tmp_path, log):
    keys = KeyRing({digest_of("hoot"): Key("acme")})
    with serving(tmp_path, keys=keys, adapters=("pirate",)) as client:
        client.headers.update({"x-api-key": "hoot", "x-request-id": "my-call"})
        answer = complete(client, model="pirate").json()
    [record] = log.records

    assert record.name == "rota.requests"
    fields = record.fields
    assert fields["id"].startswith(answer["id"])
    assert (fields["call"], fields["key"]) == ("my-call", "acme")
    assert (fields["adapter"], fields["finish"], fields["output_tokens"]) == ("pirate", "length", 5)
    assert fields["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert 0.0 < fields["queue_wait_s"] < fields["ttft_s"] < fields["e2e_s"]
    assert fields["waited_for"] == ["its adapter is not in a slot"]


# ── a port of their own ───────────────────────────────────────────────────────────────────────────────────────────────

KEYS = KeyRing({digest_of("boss"): Key("boss")})


def serve_with_keys(folder: Path, act, **options) -> None:
    """Listen on two free ports; `act` gets both addresses, and its end ends the server."""
    config = ServerConfig(port=0, metrics_port=0, **options)
    registry = Registry("letters", str(folder))
    service = EngineClient(engines(letters_device))
    access = Access(registry, KEYS, allowed_origins=config.allowed_origins)
    app = made_app(service, Tokenizer(write_byte_tokenizer(folder)), registry, access=access, config=config)
    metrics_holder = hold_metrics_port(config)
    assert metrics_holder is not None
    metrics_port = MetricsPort(metrics_holder, config)
    address = metrics_port.sentence.removeprefix("Metrics without a key: ").removesuffix("/metrics")
    failures: list[BaseException] = []

    def run(url: str) -> None:
        try:
            act(url, address)
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def announce(url: str) -> None:
        threading.Thread(target=run, args=(url,)).start()

    listen(hold_port(config.host, 0), app, service, config, announce, metrics_port=metrics_port)
    for failure in failures:
        raise failure


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers)


def test_metrics_and_probes_are_served_without_a_key_and_nothing_else(tmp_path):
    def act(url: str, address: str) -> None:
        assert get(f"{url}/metrics").status_code == 401
        scraped = get(f"{address}/metrics")
        assert scraped.status_code == 200
        assert Pod.read(scraped.text).most_adapters > 0
        assert get(f"{address}/readyz").json() == {"status": "ready"}
        paths = ("/v1/models", "/server_info", "/docs", "/openapi.json", "/dashboard", "/dashboard/events", "/")
        assert {get(address + path).status_code for path in paths} == {404}
        assert httpx.post(f"{address}/v1/completions", json={}).status_code == 404
        assert httpx.post(f"{address}/metrics").status_code == 405

    serve_with_keys(tmp_path, act)


def test_web_pages_may_not_read_the_metrics_of_their_visitors_machine(tmp_path):
    def act(_: str, address: str) -> None:
        assert get(f"{address}/metrics", **{"sec-fetch-site": "cross-site"}).status_code == 403
        assert get(f"{address}/metrics", host="evil.example").status_code == 403

    serve_with_keys(tmp_path, act)


def test_the_second_port_ends_with_the_first(tmp_path):
    seen: list[str] = []
    serve_with_keys(tmp_path, lambda _, address: seen.append(address))

    with pytest.raises(httpx.ConnectError):
        get(f"{seen[0]}/metrics")


def test_a_port_that_is_taken_is_refused_with_the_flags_that_choose_another():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*--metrics-host and --metrics-port"):
            hold_metrics_port(ServerConfig(metrics_port=port))


def test_one_port_cannot_be_both():
    with pytest.raises(ConfigError, match="metrics_port and port are both 4000"):
        ServerConfig(port=4000, metrics_port=4000)


def test_a_server_has_no_second_port_unless_it_is_asked_for_one():
    assert hold_metrics_port(ServerConfig()) is None


# ── the endpoint picker ───────────────────────────────────────────────────────────────────────────────────────────────

NAMES = ("pirate", "poet", "parrot", "prince")


def with_slots(slots: int) -> FakeDevice:
    return FakeDevice(next_token=speaks, capacity=capacity(max_sequence_tokens=CONTEXT, slots=slots, rows=4))


def pod_of(client: httpx.Client) -> Pod:
    return Pod.read(client.get("/metrics").raise_for_status().text)


def load_by_asking(client: httpx.Client, adapter: str, tokens: int = 3) -> None:
    body = {"model": adapter, "prompt": "abc", "max_tokens": tokens}
    client.post("/v1/completions", json=body).raise_for_status()


def settled(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_the_picker_prefers_the_pod_where_an_adapter_is_through_loads_and_evictions(tmp_path):
    slots = 2 if REPLICAS == 1 else 1
    with (
        serving(settled(tmp_path / "a"), with_slots(slots), adapters=NAMES) as here,
        serving(settled(tmp_path / "b"), with_slots(slots), adapters=NAMES) as there,
    ):

        def prefers(adapter: str) -> set[str]:
            return picked({"here": pod_of(here), "there": pod_of(there)}, adapter)

        assert prefers("pirate") == {"here", "there"}
        load_by_asking(here, "pirate")
        assert prefers("pirate") == {"here"}
        load_by_asking(there, "poet")
        assert prefers("poet") == {"there"}
        assert prefers("pirate") == {"here"}
        for name in ("poet", "parrot", "prince") * 2:
            load_by_asking(here, name)
        assert until(lambda: "pirate" not in pod_of(here).active or REPLICAS > 1)
        if REPLICAS == 1:  # two slots, and two later adapters in them
            assert pod_of(here).score("pirate") == 0.0
            assert prefers("pirate") == {"there"}, "there a slot is free"
        assert pod_of(here).score("prince") == 1.0


def test_in_rotation_the_list_is_of_those_in_a_slot_and_the_rest_wait(tmp_path):
    with serving(tmp_path, endless_device(slots=1, rows=4), adapters=NAMES) as client:
        threads = [
            threading.Thread(target=load_by_asking, args=(client, name, ENDLESS)) for name in NAMES[: 2 * REPLICAS]
        ]
        for thread in threads:
            thread.start()
        seen: set[str] = set()

        def has_turned() -> bool:
            pod = pod_of(client)
            assert len(pod.active) <= pod.most_adapters == REPLICAS
            assert not pod.active & pod.queued
            if pod.running:
                seen.update(pod.active)
            return seen >= set(NAMES[: 2 * REPLICAS])

        assert until(has_turned), seen
        client.post("/abort_request", json={"abort_all": True}).raise_for_status()
        for thread in threads:
            thread.join()
        assert until(lambda: pod_of(client).waiting == 0)


def test_operators_are_told_that_slots_are_too_few(tmp_path, caplog):
    """Requests for three adapters on two slots, none of which was ready for half a minute."""
    pressures: list[SlotPressure] = []

    def kept(app: FastAPI) -> FastAPI:
        pressures.append(app.state.context.pressure)
        return app

    with serving(tmp_path, around=kept) as client:
        for adapter in (1, 2, 3):
            began_at = time.monotonic() - 3 * WINDOW_S
            pressures[0].asked(RequestId(f"r{adapter}"), AdapterId(adapter), began_at)
        pressures[0].advance(began_at)
        warning, short = (
            client.get("/server_info").json()["slots"]["warning"],
            read(client)("rota_slots_short", engine="0"),
        )

    assert warning.startswith("More adapters are busy than there are slots: 3 on 2. ")
    assert short == pytest.approx(1.0, abs=0.1)
    assert [one.getMessage() for one in caplog.records].count("More adapters are busy than there are slots.") == 1


def test_nobody_is_told_of_slots_that_are_enough(tmp_path, caplog):
    with serving(tmp_path, adapters=("pirate",)) as client:
        complete(client, model="pirate")
        assert client.get("/server_info").json()["slots"]["warning"] is None
        assert read(client)("rota_slots_short", engine="0") == 0
    assert "slots" not in caplog.text


def test_operators_can_do_without_the_names_of_the_picker(tmp_path):
    with serving(tmp_path, config=ServerConfig(picker_metrics=False)) as client:
        assert "vllm:" not in client.get("/metrics").text
