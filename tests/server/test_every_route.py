"""What holds for a chat holds for every route that generates: keys, limits, names, metrics and the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.calls.reading_room import is_large
from tests.server.endless import ENDLESS, endless_device
from tests.server.letters import has_ended, letters_device, serving
from tests.waiting import until

HELLO = [{"role": "user", "content": "ab"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "ab"},
    "/v1/messages": {"messages": HELLO, "max_tokens": ENDLESS},
    "/api/chat": {"messages": HELLO, "stream": False},
    "/api/generate": {"prompt": "ab", "stream": False},
}
SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/api/chat": {"options": {"num_predict": 2}},
    "/api/generate": {"options": {"num_predict": 2}},
}
KEYS = KeyRing(
    {
        digest_of("sk-all"): Key("all"),
        digest_of("sk-pirate"): Key("pirate", frozenset({"pirate"}), may_use_base=False),
        **{digest_of(f"sk{path}"): Key(path, requests_per_minute=1) for path in BODIES},
    }
)
ended: list[str] = []


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    def note(request_id: str, *_: Any) -> None:
        ended.append(request_id)

    folder = tmp_path_factory.mktemp("model")
    with serving(folder, letters_device(), keys=KEYS, adapters=("pirate",), on_finish=[note]) as client:
        client.headers["x-api-key"] = "sk-all"
        yield client


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), endless_device()) as client:
        yield client


@pytest.fixture(params=BODIES)
def path(request) -> str:
    return request.param


def ask(client: httpx.Client, path: str, key: str = "sk-all", name: str = "", **fields: Any) -> httpx.Response:
    headers = {"x-api-key": key} | ({"X-Request-Id": name} if name else {})
    return client.post(path, json=BODIES[path] | SHORT[path] | fields, headers=headers)


def test_a_key_uses_only_what_is_on_its_list(client, path):
    assert ask(client, path, "sk-pirate").status_code == 403
    assert ask(client, path, "sk-pirate", model="pirate").status_code == 200


def test_a_key_that_used_up_its_minute_is_told_when_to_come_back(client, path):
    answers = [ask(client, path, f"sk{path}") for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 429]
    assert int(answers[1].headers["retry-after"]) > 0


def test_an_answer_has_its_name_and_is_counted_and_logged(client, path):
    def counted() -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("rota_requests_total{"))

    before, name = counted(), f"call{path.replace('/', '.')}"
    answer = ask(client, path, name=name)

    assert answer.headers["x-request-id"] == name
    assert until(lambda: any(name in one for one in ended))
    assert counted() == before + 1


@pytest.mark.parametrize("path", sorted(BODIES.keys() - {"/api/generate"}))
def test_a_large_body_is_read_in_another_process_and_answered(client, path):
    messages = [{"role": "user", "content": "a"}] * 70
    name = "input" if path == "/v1/responses" else "messages"
    assert is_large(json.dumps(messages).encode())

    answer = ask(client, path, **{name: messages})

    assert answer.status_code == 200, answer.text
    assert '"kl"' in answer.text  # the letters that follow 140 others


def test_an_answer_can_be_ended_by_its_name(endless, path):
    name = f"long{path.replace('/', '.')}"
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(endless.post, path, json=BODIES[path], headers={"X-Request-Id": name})
        assert until(lambda: endless.get(f"/v1/requests/{name}").status_code == 200)
        endless.post("/abort_request", json={"rid": name}).raise_for_status()

        assert asked.result().status_code == 200
    assert has_ended(endless)


def test_a_client_that_leaves_a_stream_ends_its_request(endless, path):
    with endless.stream("POST", path, json=BODIES[path] | {"stream": True}) as stream:
        next(stream.iter_lines())

    assert has_ended(endless)
