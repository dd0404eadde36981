from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.builders import capacity
from tests.fakes import FakeDevice
from tests.server.engines import REPLICAS
from tests.server.letters import error_of, letters_device, serving, speaks
from tests.waiting import until

# Headers leave after this long without a token, so a client can know its call by name while it waits.
EARLY = ServerConfig(stream_keep_alive=0.02)
KEYS = KeyRing(
    {
        digest_of("boss"): Key("boss"),
        digest_of("acme"): Key("acme", may_operate=False),
        digest_of("rival"): Key("rival", may_operate=False),
    }
)


def narrow_device() -> FakeDevice:
    """One request at a time, slow enough to be asked about."""
    return FakeDevice(step_s=0.05, next_token=speaks, capacity=capacity(rows=1, max_sequence_tokens=200))


@dataclass
class Asked:
    """An open call: its name, and what comes of it."""

    id: str
    lines: Iterator[str]

    def wait_for(self, events: int) -> None:
        for _ in range(events):
            next(line for line in self.lines if line.startswith("data:"))


@contextmanager
def asking(client: httpx.Client, **fields) -> Iterator[Asked]:
    body = {"prompt": "abc", "max_tokens": 180, "stream": True, **fields}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        yield Asked(stream.headers["x-request-id"], stream.iter_lines())


def standing(client: httpx.Client, id: str, **headers: str) -> dict:
    response = client.get(f"/v1/requests/{id}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_running_request_says_so_and_how_many_tokens_it_has(tmp_path):
    with serving(tmp_path, narrow_device(), EARLY) as client, asking(client) as asked:
        asked.wait_for(events=3)
        told = standing(client, asked.id)

    assert (told["object"], told["model"], told["state"], told["reason"]) == ("request", "letters", "running", "")
    assert told["position"] is None
    assert told["output_tokens"] >= 3
    assert told["since_s"] > 0.0


def test_a_waiting_request_says_why_since_when_and_how_many_are_before_it(tmp_path):
    """On each replica one request runs and two wait."""
    with serving(tmp_path, narrow_device(), EARLY) as client, ExitStack() as calls:
        running, second, third = [[calls.enter_context(asking(client)) for _ in range(REPLICAS)] for _ in range(3)]
        running[0].wait_for(events=1)
        next_ones, last_ones = [[standing(client, one.id) for one in ones] for ones in (second, third)]

    for next_one, last in zip(next_ones, last_ones, strict=True):
        assert [told["state"] for told in (next_one, last)] == ["waiting", "waiting"]
        assert next_one["reason"] == "as many requests run as may run"
        assert last["reason"] == "others of its adapter came first"
        assert (next_one["position"], last["position"]) == (0, 1)
        assert next_one["since_s"] > 0.0
        assert last["since_s"] > 0.0
        assert last["output_tokens"] == 0


def test_a_call_with_several_requests_stands_as_the_one_furthest_behind(tmp_path):
    with serving(tmp_path, narrow_device(), EARLY) as client, asking(client, n=3 * REPLICAS) as asked:
        asked.wait_for(events=1)
        told = standing(client, asked.id)

    assert told["state"] == "waiting"
    assert told["open_requests"] == 3 * REPLICAS
    states = ["running"] * REPLICAS + ["waiting"] * 2 * REPLICAS
    assert [part["state"] for part in told["requests"]] == states
    assert told["output_tokens"] == sum(part["output_tokens"] for part in told["requests"]) > 0


def test_a_request_is_known_by_the_name_its_client_gave_it_and_unknown_when_it_has_ended(tmp_path):
    with serving(tmp_path, letters_device(step_s=0.05)) as client:
        client.headers["x-request-id"] = "mine"
        with asking(client) as asked:
            asked.wait_for(events=1)
            told = standing(client, "mine")
            assert standing(client, told["id"])["id"] == told["id"]
        assert until(lambda: client.get("/v1/requests/mine").status_code == 404), "the server has not seen it leave"
        ended = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        gone = client.get("/v1/requests/mine")

    assert ended.status_code == 200
    assert gone.status_code == 404
    assert error_of(gone)["code"] == "request_not_found"
    assert "'mine'" in error_of(gone)["message"]


@pytest.mark.parametrize(("secret", "status"), [("acme", 200), ("boss", 200), ("rival", 404), ("stranger", 401)])
def test_only_its_owner_and_operators_learn_of_a_request(tmp_path, secret, status):
    with serving(tmp_path, letters_device(step_s=0.05), keys=KEYS) as client:
        client.headers["x-api-key"] = "acme"
        with asking(client) as asked:
            asked.wait_for(events=1)
            told = client.get(f"/v1/requests/{asked.id}", headers={"x-api-key": secret})

    assert told.status_code == status


def test_another_tenants_request_looks_like_one_that_never_was(tmp_path):
    with serving(tmp_path, letters_device(step_s=0.05), keys=KEYS) as client:
        client.headers["x-api-key"] = "acme"
        with asking(client) as asked:
            asked.wait_for(events=1)
            theirs = client.get(f"/v1/requests/{asked.id}", headers={"x-api-key": "rival"})
            nobodys = client.get("/v1/requests/nobodys", headers={"x-api-key": "rival"})

    assert theirs.text.replace(asked.id, "nobodys") == nobodys.text
