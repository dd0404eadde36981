"""A call has a name, also when it is refused, and its owner may ask by that name how it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.core.messages import Message
from rota.runtime.registry import Registry
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.server.applications import made_app, running
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import REPLICAS, Heedful, engines
from tests.server.letters import CONTEXT, error_of, has_ended, letters_device, serving
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

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
def narrow_context(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), letters_device(), keys=RING) as client:
        client.headers["x-api-key"] = "all"
        yield client


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("own", ["job-7", None])
def test_a_refusal_carries_the_clients_name_or_one_of_its_own(narrow_context, route, own):
    named = {"X-Request-Id": own} if own else {}

    def post(headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return narrow_context.post(route, headers=named | (headers or {}), **body)

    answers = [
        post(json={"tempratur": 1}),
        post(content=b"{"),
        post(json=BODIES[route], headers={"x-api-key": "nobody"}),
        post(json=BODIES[route] | {"lora_path": "owl"}),
        post(json=TOO_LONG[route]),
        post(json=TOO_LONG[route] | {"stream": True}),
        post(content=b"", headers={"Content-Encoding": "br"}),
    ]
    names = [answer.headers["X-Request-Id"] for answer in answers]

    assert [answer.status_code for answer in answers] == [400, 400, 401, 404, 400, 400, 415]
    if own:
        assert set(names) == {own}
    else:
        assert len(set(names)) == len(names)
        assert all(len(name) == 32 for name in names)


def test_a_name_that_is_none_is_not_repeated(narrow_context):
    refused = narrow_context.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "a b"})

    assert (refused.status_code, error_of(refused)["param"]) == (400, "X-Request-Id")
    assert len(refused.headers["X-Request-Id"]) == 32


def test_a_name_in_the_body_is_the_calls_name_from_there_on(narrow_context):
    refused = narrow_context.post("/generate", json={"text": LONG, "rid": "mine"}, headers={"X-Request-Id": "header"})

    assert (refused.status_code, refused.headers["X-Request-Id"]) == (400, "mine")


def test_whoever_has_used_up_its_minute_is_told_under_its_name(narrow_context):
    headers = {"x-api-key": "once", "X-Request-Id": "job-7"}
    answers = [
        narrow_context.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers) for _ in range(2)
    ]

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


# ── how a request stands ──────────────────────────────────────────────────────────────────────────────────────────────

# Headers leave after this long without a token, so a client can know its call by name while it waits.
EARLY = ServerConfig(stream_keep_alive=0.02)
KEYS = KeyRing(
    {
        digest_of("boss"): Key("boss"),
        digest_of("acme"): Key("acme", may_operate=False),
        digest_of("rival"): Key("rival", may_operate=False),
    }
)


@dataclass
class Asked:
    """An open call: its name, and what comes of it."""

    id: str
    lines: Iterator[str]

    def wait_for(self, events: int) -> None:
        for _ in range(events):
            next(line for line in self.lines if line.startswith("data:"))


@contextmanager
def asking(client: httpx.Client, headers: dict[str, str] | None = None, **fields) -> Iterator[Asked]:
    body = {"prompt": "abc", "max_tokens": ENDLESS, "stream": True, **fields}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        assert stream.status_code == 200, stream.read()
        yield Asked(stream.headers["x-request-id"], stream.iter_lines())


def standing(client: httpx.Client, id: str, **headers: str) -> dict:
    response = client.get(f"/v1/requests/{id}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def states_of(told: dict) -> list[str]:
    return [part["state"] for part in told["requests"]]


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), endless_device(rows=1), EARLY) as client:
        yield client


@pytest.fixture
def narrow(one_at_a_time) -> Iterator[httpx.Client]:
    """A client of a server where one request runs at a time, and until its client leaves."""
    yield one_at_a_time
    assert has_ended(one_at_a_time)


def test_a_running_request_says_so_and_how_many_tokens_it_has(narrow):
    with asking(narrow) as asked:
        asked.wait_for(events=3)
        told = standing(narrow, asked.id)

    assert (told["object"], told["model"], told["state"], told["reason"]) == ("request", "letters", "running", "")
    assert told["position"] is None
    assert told["output_tokens"] >= 3
    assert told["since_s"] > 0.0


def test_a_waiting_request_says_why_since_when_and_how_many_are_before_it(narrow):
    """On each replica one request runs and two wait."""
    with ExitStack() as calls:
        running, second, third = [[calls.enter_context(asking(narrow)) for _ in range(REPLICAS)] for _ in range(3)]
        for one in running:
            one.wait_for(events=1)
        next_ones, last_ones = [[standing(narrow, one.id) for one in ones] for ones in (second, third)]

    for next_one, last in zip(next_ones, last_ones, strict=True):
        assert [told["state"] for told in (next_one, last)] == ["waiting", "waiting"]
        assert next_one["reason"] == "as many requests run as may run"
        assert last["reason"] == "others of its adapter came first"
        assert (next_one["position"], last["position"]) == (0, 1)
        assert next_one["since_s"] > 0.0
        assert last["since_s"] > 0.0
        assert last["output_tokens"] == 0


def test_a_call_with_several_requests_stands_as_the_one_furthest_behind(narrow):
    with asking(narrow, n=3 * REPLICAS) as asked:
        # The token of one replica says nothing of the others.
        assert until(lambda: states_of(standing(narrow, asked.id)).count("running") == REPLICAS)
        asked.wait_for(events=1)
        told = standing(narrow, asked.id)

    assert told["state"] == "waiting"
    assert told["open_requests"] == 3 * REPLICAS
    assert states_of(told) == ["running"] * REPLICAS + ["waiting"] * 2 * REPLICAS
    assert told["output_tokens"] == sum(part["output_tokens"] for part in told["requests"]) > 0


def test_a_request_is_known_by_the_name_its_client_gave_it_and_unknown_when_it_has_ended(narrow):
    mine = {"x-request-id": "mine"}
    with asking(narrow, mine) as asked:
        asked.wait_for(events=1)
        told = standing(narrow, "mine")
        assert standing(narrow, told["id"])["id"] == told["id"]
    assert until(lambda: narrow.get("/v1/requests/mine").status_code == 404), "the server has not seen it leave"
    ended = narrow.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}, headers=mine)
    gone = narrow.get("/v1/requests/mine")

    assert ended.status_code == 200
    assert gone.status_code == 404
    assert error_of(gone)["code"] == "request_not_found"
    assert "'mine'" in error_of(gone)["message"]


def test_only_its_owner_and_operators_learn_of_a_request_and_others_as_if_it_never_was(tmp_path):
    with serving(tmp_path, endless_device(), keys=KEYS) as client, asking(client, {"x-api-key": "acme"}) as asked:
        asked.wait_for(events=1)
        secrets = ("acme", "boss", "rival", "stranger")
        told = {one: client.get(f"/v1/requests/{asked.id}", headers={"x-api-key": one}) for one in secrets}
        nobodys = client.get("/v1/requests/nobodys", headers={"x-api-key": "rival"})

    assert [answer.status_code for answer in told.values()] == [200, 200, 404, 401]
    assert told["rival"].text.replace(asked.id, "nobodys") == nobodys.text
