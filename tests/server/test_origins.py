"""Web pages: which of them may use the server through a visitor's browser, and what their browsers are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.server.access.exposure import check_exposure
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.dashboard.stage import stage
from tests.server.letters import error_of, events_of, serving
from tests.server.test_metrics import get, serve_with_keys

KEYS = KeyRing({digest_of("sk"): Key("all")})
CHAT = "https://chat.example"
ASK = {"prompt": "abc", "max_tokens": 3}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("letters")


@pytest.fixture(scope="module")
def bare(folder) -> Iterator[httpx.Client]:
    """A server without keys that allows no site."""
    with serving(folder, adapters=("pirate",)) as client:
        yield client


@pytest.fixture(scope="module")
def chat(folder) -> Iterator[httpx.Client]:
    """A server with keys, and a site whose pages may use it."""

    def with_a_fault(app: FastAPI) -> FastAPI:
        app.add_api_route("/broken", _break, methods=["GET"])
        return app

    with serving(folder, keys=KEYS, config=ServerConfig(allowed_origins=(CHAT,)), around=with_a_fault) as client:
        yield client


async def _break() -> None:
    raise LookupError("nobody expects this")


def ask(client: httpx.Client, **headers: str) -> httpx.Response:
    return client.post("/v1/completions", json=ASK, headers=headers)


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://10.0.0.7:30000", "10.0.0.7:30000", 200),
        ("https://rota.example", "rota.example", 200),  # a proxy ends TLS
        ("https://rota.example", "rota.example:443", 200),
        ("http://Rota.Example", "rota.example:80", 200),
        ("http://[fd00::2]:30000", "[fd00::2]:30000", 200),
        ("http://10.0.0.7:8080", "10.0.0.7:30000", 403),  # another server of the same machine
        ("http://10.0.0.7", "10.0.0.7:30000", 403),
        ("http://evil.example", "10.0.0.7:30000", 403),
        ("http://10.0.0.7:30000.evil.example", "10.0.0.7:30000", 403),
        ("http://evil.example/10.0.0.7:30000", "10.0.0.7:30000", 403),
        ("http://rota.example", "rota.example:443", 403),
        ("null", "10.0.0.7:30000", 403),
        ("null", "null", 403),
        ("", "10.0.0.7:30000", 403),
        ("http://", "", 403),
        ("*", "10.0.0.7:30000", 403),
    ],
)
def test_an_origin_must_have_the_host_of_its_request(bare, origin, host, status):
    answer = ask(bare, origin=origin, host=host)

    assert answer.status_code == status, answer.text
    assert status == 200 or "--allowed-origins" in error_of(answer)["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_two_origins_are_none(bare):
    host = bare.base_url.netloc.decode()
    twice = [("origin", f"http://{host}"), ("origin", "http://evil.example")]
    for headers in (twice, twice[::-1]):
        assert bare.post("/v1/completions", json=ASK, headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("POST", "/v1/unload_lora_adapter"),
        ("DELETE", "/v1/adapters/pirate"),
        ("POST", "/flush_cache"),
        ("POST", "/pause"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/health"),
    ],
)
def test_no_route_obeys_a_page_of_another_site(bare, verb, path):
    """A page sends text/plain without asking first, and a browser leaves Sec-Fetch-Site out on plain HTTP."""
    headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    assert bare.request(verb, path, content='{"lora_name": "pirate"}', headers=headers).status_code == 403
    assert [one["id"] for one in bare.get("/v1/models").json()["data"]] == ["letters", "pirate"]


def test_the_dashboard_shows_its_data_to_no_page_of_another_site(tmp_path):
    with stage(tmp_path, journal_dir=tmp_path) as made:
        for path in ("/dashboard/events", "/dashboard/journals/run.jsonl"):
            for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
                assert get(made.url + path, **headers).status_code == 403


def test_the_metrics_port_serves_pages_of_its_own_host_alone(tmp_path):
    def act(_: str, address: str) -> None:
        assert get(f"{address}/metrics", origin=address).status_code == 200
        for origin in (CHAT, "http://evil.example", "null"):
            refused = get(f"{address}/metrics", origin=origin)
            assert refused.status_code == 403
            assert "access-control-allow-origin" not in refused.headers

    # That a site may use the API with a key does not make what needs no key its business.
    serve_with_keys(tmp_path, act, allowed_origins=(CHAT,))
    serve_with_keys(tmp_path, act, allowed_origins=("*",))


def test_a_browser_may_send_the_requests_of_a_site_that_is_allowed(chat):
    answer = chat.options("/v1/chat/completions", headers={"Origin": CHAT, **PREFLIGHT})

    assert answer.status_code == 200, "it needs no key: browsers send none with it"
    assert answer.headers["access-control-allow-origin"] == CHAT
    assert {"GET", "POST", "PUT", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert int(answer.headers["access-control-max-age"]) > 0
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "http://chat.example", "https://chat.example.evil", "null"])
def test_a_browser_sends_nothing_for_a_site_that_is_not_allowed(chat, origin):
    preflight = chat.options("/v1/chat/completions", headers={"Origin": origin, **PREFLIGHT})
    refused = ask(chat, origin=origin, authorization="Bearer sk")

    assert preflight.status_code == 400
    assert refused.status_code == 403
    for answer in (preflight, refused):
        assert "access-control-allow-origin" not in answer.headers
        assert "Origin" in answer.headers["vary"]


def test_a_site_that_is_allowed_needs_a_key_and_reads_answers_and_errors(chat):
    # Of a page on a trustworthy address browsers also say that it is another site's.
    headers = {"origin": CHAT, "sec-fetch-site": "cross-site"}
    with_key = {**headers, "authorization": "Bearer sk"}
    answers = {
        200: ask(chat, **with_key),
        401: ask(chat, **headers),
        400: chat.post("/v1/completions", json={"prompt": 7}, headers=with_key),
        404: chat.get("/nowhere", headers=with_key),
        500: chat.get("/broken", headers=with_key),
    }

    for status, answer in answers.items():
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == CHAT
        assert "Origin" in answer.headers["vary"]
        shown = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "x-rota-adapter-version", "retry-after"} <= set(shown)


def test_streams_are_read_by_a_site_that_is_allowed(chat):
    body = {**ASK, "stream": True}
    with chat.stream(
        "POST", "/v1/completions", json=body, headers={"origin": CHAT, "authorization": "Bearer sk"}
    ) as answer:
        assert answer.headers["access-control-allow-origin"] == CHAT
        answer.read()
        assert events_of(answer)


def test_who_sends_no_origin_is_served_as_before(chat):
    answer = ask(chat, authorization="Bearer sk")

    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_pages_of_the_own_host_need_no_list(chat):
    own = {"origin": f"https://{chat.base_url.netloc.decode()}", "authorization": "Bearer sk"}
    assert ask(chat, **own).status_code == 200


def test_with_keys_every_site_may_be_allowed_but_null(folder):
    with serving(folder, keys=KEYS, config=ServerConfig(allowed_origins=("*",))) as client:
        answer = ask(client, origin="https://any.example", authorization="Bearer sk")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers
        assert ask(client, origin="https://any.example").status_code == 401
        assert ask(client, origin="null", authorization="Bearer sk").status_code == 403


def test_without_keys_not_every_site_may_be_allowed(folder):
    config = ServerConfig(allowed_origins=("*",))
    with pytest.raises(ConfigError, match=r"--allowed-origins \* .* keys"):
        check_exposure(config, KeyRing())
    check_exposure(config, KEYS)
    check_exposure(ServerConfig(allowed_origins=(CHAT,)), KeyRing())
    with serving(folder, config=config) as client:  # as if all keys had been taken away since
        assert ask(client, origin="https://any.example").status_code == 403


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "chat.example",
        "https://chat.example/",
        "https://chat.example/app",
        "https://chat.example:443",
        "http://chat.example:80",
        "https://*.example",
        "HTTPS://chat.example",
        '["*"]',
        "https://",
        "",
    ],
)
def test_what_no_browser_sends_as_an_origin_is_refused_at_the_start(origin):
    with pytest.raises(ConfigError, match=r"allowed_origins has .* for example https://"):
        ServerConfig(allowed_origins=(origin,))


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "tauri://localhost", "http://[::1]", "https://chat.example"]
)
def test_origins_are_given_as_browsers_send_them(origin):
    assert ServerConfig(allowed_origins=(origin,)).allowed_origins == (origin,)
