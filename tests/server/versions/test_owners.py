"""Who may change a name, and whose it is then, is decided when the name gets its version, not when the call began."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import httpx
import pytest

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import AdapterAdded
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.core.messages import AddAdapter, Message, RemoveAdapter
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.adapters.manager import AdapterManager
from tests.server.letters import serving
from tests.server.versions.serving import Paused, SlowDevice, send, weights

ACME, BIRDS = (Key(name, frozenset({"shared-*"}), may_operate=False) for name in ("acme", "birds"))
RING = KeyRing({digest_of(key.name): key for key in (Key("boss"), ACME, BIRDS)})


@pytest.fixture
def client(tmp_path, monkeypatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with serving(tmp_path, SlowDevice(), keys=RING) as client:
        client.headers["x-api-key"] = "boss"
        yield client


def owner(client: httpx.Client, name: str) -> str:
    listed: str = client.get(f"/v1/adapters/{name}").json()["owner"]
    return listed


def test_a_name_that_another_key_loads_while_a_body_arrives_stays_that_keys(client):
    late = Paused(str(client.base_url), "acme", "shared-owl", weights())
    client.headers["x-api-key"] = "birds"
    assert send(client, "shared-owl", weights({"adapter_config": "{}"})).json()["current"] == 1

    status, text = late.finish()
    assert (status, "it is not this key's own" in text) == (403, True)
    client.headers["x-api-key"] = "boss"
    assert (owner(client, "shared-owl"), client.get("/v1/adapters/shared-owl").json()["version"]) == ("birds", 1)


def test_of_two_bodies_for_a_new_name_the_first_that_is_complete_is_its_owners(client):
    bodies = {key: Paused(str(client.base_url), key, "shared-owl", weights()) for key in ("acme", "birds")}

    assert [bodies[key].finish()[0] for key in ("birds", "acme")] == [200, 403]
    assert owner(client, "shared-owl") == "birds"


class Ready:
    """A service that has read whatever it is told to read."""

    def __init__(self) -> None:
        self.removed: list[AdapterId] = []
        self.adapters = AdapterManager(cast(Service, self), Registry("letters", "/models/letters"))

    def send(self, message: Message) -> None:
        if isinstance(message, AddAdapter):
            event = AdapterAdded(message.adapter.adapter_id, message.at)
            asyncio.get_running_loop().call_soon(self.adapters.observe, [event])
        elif isinstance(message, RemoveAdapter):
            self.removed.append(message.adapter_id)


def test_a_right_that_is_lost_while_a_version_is_read_keeps_the_name_as_it_was():
    service, answers = Ready(), iter([True, False])

    def decide(asked: LoraPath) -> LoraPath:
        if not next(answers):
            raise RequestError(Fault(FaultCode.FORBIDDEN, "Not any more."))
        return replace(asked, owner="acme")

    async def renew() -> None:
        await service.adapters.load(LoraPath(name="owl", path="/a"))
        with pytest.raises(RequestError, match="Not any more"):
            await service.adapters.update(LoraPath(name="owl", path="/b"), decide=decide)

    asyncio.run(renew())
    assert ([one.path for one in service.adapters.loaded], service.removed) == (["/a"], [2])
