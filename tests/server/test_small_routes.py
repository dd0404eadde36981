"""What clients and platforms ask a server before they send it a request."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from rota.core.version import __version__
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.server.endless import endless_device
from tests.server.letters import serving
from tests.waiting import until

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYS = KeyRing({digest_of("sk-all"): Key("all"), digest_of("sk-user"): Key("user", may_operate=False, may_load=False)})


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), endless_device(), keys=KEYS) as client:
        yield client


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_sends_a_browser_to_the_dashboard(client, method):
    pytest.importorskip("rota.dashboard", reason="without the dashboard a browser is answered as others are")
    browser = client.request(method, "/", headers=BROWSER)

    assert (browser.status_code, str(browser.next_request.url)) == (307, str(client.base_url.join("/dashboard")))


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_answers_others_as_ollama(client, method):
    other = client.request(method, "/")

    assert (other.status_code, other.text) == (200, "Ollama is running" if method == "GET" else "")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_is_a_health_check_without_a_key(client, method):
    assert client.request(method, "/ping").status_code == 200


@pytest.mark.parametrize("path", ["/version", "/api/version"])
def test_the_version_is_for_those_with_a_key(client, path):
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"x-api-key": "sk-user"}).json() == {"version": __version__}


def test_the_load_is_the_number_of_open_calls_and_for_operators(client):
    def load() -> int:
        return client.get("/load", headers={"x-api-key": "sk-all"}).json()["server_load"]

    assert client.get("/load", headers={"x-api-key": "sk-user"}).status_code == 403
    assert load() == 0
    asked = {"prompt": "a", "max_tokens": 100_000, "stream": True}
    headers = {"x-api-key": "sk-user"}
    with client.stream("POST", "/v1/completions", json=asked, headers=headers) as stream:
        lines = stream.iter_lines()  # httpx closes a stream whose lines are dropped
        next(lines)
        assert load() == 1
    assert until(lambda: load() == 0)
