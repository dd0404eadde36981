"""However many versions keys send at a time, no key takes another's room or name."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import AdapterAdded
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.core.messages import AddAdapter, Message, RemoveAdapter
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.adapters.manager import AdapterManager
from rota.server.adapters.room import MOST_UPLOADS, KeyRoom
from tests.server.letters import error_of, serving
from tests.server.versions.serving import CONFIG, Paused, SlowDevice, put, send, weights
from tests.waiting import TIMEOUT_S, until

# ── room ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

ACME, BIRDS = (Key(name, frozenset({f"{name}-*"}), may_operate=False, adapter_root="/a") for name in ("acme", "birds"))
BODY = weights(size=4096)


@contextmanager
def served(folder: Path, acme: Key = ACME) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A client of each key."""
    ring = KeyRing({digest_of(key.name): key for key in (Key("boss"), acme, BIRDS)})
    with serving(folder, SlowDevice(), keys=ring) as client, ExitStack() as stack:
        options = {"base_url": client.base_url, "timeout": TIMEOUT_S, "verify": False}
        both = [httpx.Client(headers={"x-api-key": name}, **options) for name in ("acme", "birds")]
        yield stack.enter_context(both[0]), stack.enter_context(both[1])


@pytest.fixture(autouse=True)
def _spool(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_key_that_sends_as_many_bodies_as_it_may_keeps_no_slot_from_another(tmp_path):
    with served(tmp_path) as (acme, birds), ExitStack() as open_bodies:
        for number in range(MOST_UPLOADS):
            body = open_bodies.enter_context(closing(Paused(str(acme.base_url), "acme", f"acme-{number}", BODY)))
            assert body.began
        refused = send(acme, "acme-more", BODY, config=CONFIG)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
        assert error_of(refused)["message"] == (
            "Key 'acme' sends 8 adapters already, as many as it may now; try again later."
        )
        shares = [Paused(str(birds.base_url), "birds", f"birds-{number}", BODY) for number in range(5)]
        assert [one.began for one in shares] == [True] * 4 + [False], "two keys that send share the slots"
        assert [one.finish()[0] for one in shares] == [200] * 4 + [429]
        assert send(birds, "birds-last", BODY, config=CONFIG).status_code == 200


def test_a_key_sends_no_more_bodies_at_a_time_than_its_limit(tmp_path):
    with served(tmp_path, replace(ACME, max_uploads=1)) as (acme, _):
        with closing(Paused(str(acme.base_url), "acme", "acme-1", BODY)):
            assert send(acme, "acme-2", BODY, config=CONFIG).status_code == 429
        assert until(lambda: send(acme, "acme-2", BODY, config=CONFIG).status_code == 200)


def test_what_a_key_keeps_is_counted_in_bytes_until_it_is_gone(tmp_path):
    size = len(BODY)
    with served(tmp_path, replace(ACME, max_adapter_bytes=2 * size)) as (acme, birds):
        for name in ("acme-1", "acme-2"):
            assert send(acme, name, BODY, config=CONFIG).status_code == 200
        for content in (BODY, iter([BODY])):  # with its length, and without
            refused = send(acme, "acme-3", content, config=CONFIG)
            assert (refused.status_code, error_of(refused)["code"]) == (403, "key_limit_reached")
            assert f"may take {2 * size:,} bytes on the server's disks, its max_adapter_bytes" in refused.text
        assert send(birds, "birds-1", BODY, config=CONFIG).status_code == 200
        assert acme.delete("/v1/adapters/acme-1").json()["is_gone"]
        assert send(acme, "acme-3", iter([BODY]), config=CONFIG).status_code == 200


def test_a_key_takes_no_more_of_the_disk_than_it_leaves(tmp_path, monkeypatch):
    usage, size = shutil.disk_usage(tmp_path), len(BODY)
    with served(tmp_path) as (acme, birds):
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=2 * size))
        assert send(acme, "acme-1", BODY, config=CONFIG).status_code == 200
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=2 * size))
        refused = send(acme, "acme-2", BODY, config=CONFIG)
        assert (refused.status_code, "more of the server's disk than it leaves to others" in refused.text) == (
            403,
            True,
        )
        assert send(birds, "birds-1", BODY, config=CONFIG).status_code == 200


def test_a_key_has_no_more_adapters_and_kept_versions_than_its_limit(tmp_path):
    with served(tmp_path, replace(ACME, max_adapters=2)) as (acme, birds):
        assert [put(acme, f"acme-{number}").status_code for number in range(3)] == [200, 200, 403]
        assert put(acme, "acme-0").status_code == 200, "a version that takes another's place"
        assert until(lambda: len(acme.get("/v1/adapters/acme-0").json()["versions"]) == 1)
        for fields in ({"mode": "stage"}, {"keep_old": True}):
            refused = put(acme, "acme-0", **fields)
            assert (refused.status_code, error_of(refused)["code"]) == (403, "key_limit_reached")
        load = {"lora_name": "acme-3", "lora_path": "/a"}
        assert acme.post("/v1/load_lora_adapter", json=load).status_code == 403
        assert [one["id"] for one in acme.get("/v1/models").json()["data"]] == ["letters", "acme-0", "acme-1"]
        assert put(birds, "birds-0").status_code == 200
        assert acme.delete("/v1/adapters/acme-1").json()["is_gone"]
        assert acme.post("/v1/load_lora_adapter", json=load).status_code == 200


def test_keys_without_limits_leave_adapters_to_each_other(monkeypatch):
    monkeypatch.setattr("rota.server.adapters.room.MOST_VERSIONS", 8)
    keys = {"acme": ACME, "birds": BIRDS, "boss": Key("boss")}
    room = KeyRoom(keys.get, lambda: 0)

    def take(owner: str, times: int, first: int) -> int:
        """How many of them were taken."""
        for number in range(times):
            one = Adapter(adapter_id=AdapterId(first + number), name="owl", path="/owl", owner=owner)
            try:
                room.take(one, is_more=True)
            except RequestError:
                return number
        return times

    assert (take("acme", 20, 100), take("birds", 20, 200), take("boss", 20, 300)) == (4, 2, 20)
    for number in (100, 101):
        room.drop(AdapterId(number))
    assert take("birds", 1, 400) == 1


def test_adapters_of_sources_count_with_their_bytes_for_whose_they_are():
    room = KeyRoom({"acme": replace(ACME, max_adapter_bytes=100)}.get, lambda: 0)

    def take(number: int, size: int) -> None:
        one = Adapter(adapter_id=AdapterId(number), name="owl", path="s3://owls/owl", owner="acme", size_bytes=size)
        room.take(one, is_more=False)

    take(1, 60)
    with pytest.raises(RequestError, match=r"may take 100 bytes .*: they take 60, and this one 41"):
        take(2, 41)
    room.drop(AdapterId(1))
    take(3, 100)


# ── whose a name is ───────────────────────────────────────────────────────────────────────────────────────────────────

NAMER, BIRD_KEY = (Key(name, frozenset({"shared-*"}), may_operate=False) for name in ("acme", "birds"))
OWNERS = KeyRing({digest_of(key.name): key for key in (Key("boss"), NAMER, BIRD_KEY)})


@pytest.fixture
def client(tmp_path) -> Iterator[httpx.Client]:
    with serving(tmp_path, SlowDevice(), keys=OWNERS) as client:
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
        self.registry = Registry("letters", "/models/letters")
        self.adapters = AdapterManager(cast(Service, self), self.registry)

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
    assert ([one.path for one in service.registry.adapters], service.removed) == (["/a"], [2])
