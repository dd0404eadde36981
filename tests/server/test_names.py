"""Every refusal of a call carries a name, so that whoever was refused can ask why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rota.core.messages import Message
from rota.runtime.registry import Registry
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.server.applications import made_app
from tests.server.engines import Heedful, engines
from tests.server.letters import CONTEXT, error_of, letters_device, serving
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

LONG = "x" * (CONTEXT + 1)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/generate": {"text": "abc"},
}
TOO_LONG: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/generate": {"text": LONG},
}
RING = KeyRing({digest_of("all"): Key("all"), digest_of("once"): Key("once", requests_per_minute=1)})


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), letters_device(), keys=RING) as client:
        client.headers["x-api-key"] = "all"
        yield client


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("own", ["job-7", None])
def test_a_refusal_carries_the_clients_name_or_one_of_its_own(client, route, own):
    named = {"X-Request-Id": own} if own else {}

    def post(headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return client.post(route, headers=named | (headers or {}), **body)

    answers = [
        post(json={"tempratur": 1}),
        post(content=b"{"),
        post(json=BODIES[route], headers={"x-api-key": "nobody"}),
        post(json=BODIES[route] | {"lora_path": "owl"}),
        post(json=TOO_LONG[route]),
        post(json=TOO_LONG[route] | {"stream": True}),
        post(content=b"", headers={"Content-Encoding": "gzip"}),
    ]
    names = [answer.headers["X-Request-Id"] for answer in answers]

    assert [answer.status_code for answer in answers] == [400, 400, 401, 404, 413, 413, 415]
    if own:
        assert set(names) == {own}
    else:
        assert len(set(names)) == len(names)
        assert all(len(name) == 32 for name in names)


def test_a_name_that_is_none_is_not_repeated(client):
    refused = client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "a b"})

    assert (refused.status_code, error_of(refused)["param"]) == (400, "X-Request-Id")
    assert len(refused.headers["X-Request-Id"]) == 32


def test_a_name_in_the_body_is_the_calls_name_from_there_on(client):
    refused = client.post("/generate", json={"text": LONG, "rid": "mine"}, headers={"X-Request-Id": "header"})

    assert (refused.status_code, refused.headers["X-Request-Id"]) == (413, "mine")


def test_whoever_has_used_up_its_minute_is_told_under_its_name(client):
    headers = {"x-api-key": "once", "X-Request-Id": "job-7"}
    answers = [client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].headers["X-Request-Id"] == "job-7"
    assert int(answers[1].headers["Retry-After"]) >= 1


def breaks(_: object) -> int:
    raise ZeroDivisionError("a kernel went wrong")


@pytest.mark.parametrize("route", BODIES)
def test_an_error_of_the_engines_carries_the_name_too(tmp_path, route, capsys):
    with serving(tmp_path, FakeDevice(next_token=breaks)) as client:
        failed = client.post(route, json=BODIES[route], headers={"X-Request-Id": "job-7"}, timeout=TIMEOUT_S)
        down = client.post(route, json=BODIES[route])

    assert (failed.status_code, failed.headers["X-Request-Id"]) == (503, "job-7")
    assert (down.status_code, len(down.headers["X-Request-Id"])) == (503, 32)
    assert "ZeroDivisionError" in capsys.readouterr().err


class ClumsyService(Heedful):
    """Has a bug."""

    def send(self, message: Message) -> None:
        raise ZeroDivisionError


def test_an_error_of_our_own_carries_the_name_too(tmp_path):
    service = ClumsyService(engines(FakeDevice))
    app = made_app(service, Tokenizer(write_byte_tokenizer(tmp_path)), Registry("letters", str(tmp_path)))
    with running(app) as url:
        failed = httpx.post(
            f"{url}/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "job-7"}, timeout=TIMEOUT_S
        )

    assert (failed.status_code, failed.headers["X-Request-Id"]) == (500, "job-7")
    assert "ZeroDivisionError" in error_of(failed)["message"]
