from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.door.door import hold_metrics_port, hold_port
from rota.server.listen import MetricsPort, listen
from rota.text.tokenizer import Tokenizer
from tests.observe.picker import Pod
from tests.server.applications import made_app
from tests.server.engines import engines
from tests.server.letters import letters_device
from tests.tiny_tokenizer import write_byte_tokenizer

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
