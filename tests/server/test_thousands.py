"""Thousands of adapters: clients see and use each of them, and lists of them keep nobody waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import cast

import httpx
import pytest

from rota.core.lora_paths import LoraPath
from rota.runtime.live import MOST_CHECKED
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.runtime.spool import Spool
from rota.server.access.keys import ANYONE
from rota.server.adapters.listing import Listing
from rota.server.adapters.manager import AdapterManager
from rota.server.route import PORTION, list_response
from tests.server.letters import serving

NAMES = tuple(f"adapter-{number:04}" for number in range(2 * MOST_CHECKED))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("letters"), adapters=NAMES) as client:
        yield client


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def test_each_is_listed_in_its_order_and_counted_before_anybody_asks_for_it(client):
    models = client.get("/v1/models").json()
    assert (models["object"], models["data"][0]["id"]) == ("list", "letters")
    assert [one["id"] for one in models["data"][1:]] == list(NAMES)
    assert client.get("/v1/models/adapter-0999").json() == models["data"][-1]

    adapters = client.get("/v1/adapters").json()["data"]
    assert [one["name"] for one in adapters] == list(NAMES)
    assert client.get("/v1/adapters/adapter-0999").json() == adapters[-1]
    assert adapters[-1]["versions"][0]["state"] == "current"
    assert adapters[-1]["versions"][0]["loaded_at"] > 0

    assert [one["name"] for one in client.get("/api/tags").json()["models"]] == ["letters", *NAMES]
    assert metric(client, "rota_adapters_loaded") == len(NAMES)


def test_each_answers_also_those_that_the_engine_was_not_told_of(client):
    for name in (NAMES[0], NAMES[MOST_CHECKED], NAMES[-1]):
        answer = client.post("/v1/completions", json={"model": name, "prompt": "abc", "max_tokens": 3})
        assert (answer.json()["choices"][0]["text"], answer.headers["x-rota-adapter-version"]) == ("def", "1")


def test_one_that_nobody_asked_for_gets_a_new_version_and_is_unloaded(client):
    name, other = NAMES[-2], NAMES[-3]
    assert client.put(f"/v1/adapters/{name}", json={"path": "/adapters/new"}).json()["version"] == 2
    answer = client.post("/v1/completions", json={"model": name, "prompt": "abc", "max_tokens": 3})
    assert answer.headers["x-rota-adapter-version"] == "2"
    for gone in (name, other):
        assert client.delete(f"/v1/adapters/{gone}").json()["is_gone"]
        assert client.post("/v1/completions", json={"model": gone, "prompt": "abc"}).status_code == 404
    assert metric(client, "rota_adapters_loaded") == len(NAMES) - 2


def test_a_long_list_is_written_in_portions_and_others_go_between_them():
    async def write() -> tuple[bytes, int]:
        turns, is_written = 0, asyncio.Event()

        async def take_turns() -> None:
            nonlocal turns
            while not is_written.is_set():
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(take_turns())
        response = await list_response('{"data":', ({"number": number} for number in range(10 * PORTION)))
        is_written.set()
        await other
        return bytes(response.body), turns

    body, turns = asyncio.run(write())
    assert json.loads(body) == {"data": [{"number": number} for number in range(10 * PORTION)]}
    assert turns >= 10


@pytest.mark.parametrize("entries", [[], ["é"]])
def test_a_short_list_is_a_list_too(entries):
    response = asyncio.run(list_response('{"data":', entries))
    assert (json.loads(response.body), response.media_type) == ({"data": entries}, "application/json")


def test_an_adapter_that_is_unloaded_while_the_list_is_written_is_left_out():
    registry = Registry("letters", "/models/letters")
    for name in "abc":
        registry.add(LoraPath(name=name, path=f"/adapters/{name}"))
    adapters = AdapterManager(cast(Service, None), registry)
    entries = Listing(registry, adapters, Spool()).all_for(ANYONE)

    assert next(entries).name == "a"
    registry.forget("b")
    assert [one.name for one in entries] == ["c"]
