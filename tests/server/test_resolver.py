"""Names that a server was not told of are looked for below one prefix, once for many who ask, for keys that may."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.errors import AdapterError, ConfigError, DiskError, FaultCode, RequestError
from rota.core.lora_paths import LoraPath
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.keys import ANYONE, Key, KeyRing, digest_of
from rota.server.adapters.resolver import MISSED_S, MOST_AT_ONCE, Resolver
from rota.sources.prefix import Prefix, is_within
from rota.sources.source import NothingError, UnreachableError
from rota.text.tokenizer import Tokenizer
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.server.letters import letters_device
from tests.tiny_tokenizer import write_byte_tokenizer

PREFIX = "s3://bucket/adapters"


class Loads:
    """Stands for the adapter manager: what it has loaded, and what it says of a name."""

    def __init__(self, registry: Registry, **outcomes: Exception) -> None:
        self.registry, self.outcomes = registry, outcomes
        self.asked: list[LoraPath] = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, asked: LoraPath) -> None:
        self.asked.append(asked)
        await self.may_end.wait()
        if asked.name in self.outcomes:
            raise self.outcomes[asked.name]
        self.registry.add(asked)


def resolver(prefix: str = PREFIX, **options: Any) -> tuple[Resolver, Loads]:
    registry = Registry("tiny", "/models/tiny")
    outcomes = {name: options.pop(name) for name in list(options) if isinstance(options[name], Exception)}
    loads = Loads(registry, **outcomes)
    return Resolver(Prefix(prefix), registry, loads, **options), loads


def key(**fields: Any) -> Key:
    return Key("acme", may_operate=False, may_load=False, **fields)


def refusal(coroutine: Any) -> Any:
    with pytest.raises(RequestError) as caught:
        asyncio.run(coroutine)
    return caught.value.fault


def test_a_name_is_loaded_from_below_the_prefix():
    found, loads = resolver()
    asyncio.run(found.resolve(ANYONE, "tiny:acme/legal"))
    assert loads.asked == [LoraPath(name="acme/legal", path="s3://bucket/adapters/acme/legal", root=PREFIX)]
    asyncio.run(found.resolve(ANYONE, "acme/legal"))
    assert len(loads.asked) == 1, "it is known by now"


@pytest.mark.parametrize("model", [None, "tiny", "", "..", "a/../b", "/etc", "a//b", "a%2e", "a\n", "a@3", "x" * 201])
def test_what_is_no_name_below_it_is_not_looked_for(model):
    found, loads = resolver()
    asyncio.run(found.resolve(ANYONE, model))
    assert loads.asked == []


def test_many_who_ask_wait_for_one_load():
    async def ask() -> int:
        found, loads = resolver()
        loads.may_end.clear()
        asks = [asyncio.create_task(found.resolve(ANYONE, "legal")) for _ in range(20)]
        while not loads.asked:
            await asyncio.sleep(0)  # until the first of them has begun
        loads.may_end.set()
        await asyncio.gather(*asks)
        return len(loads.asked)

    assert asyncio.run(ask()) == 1


def test_one_who_leaves_does_not_end_the_load_of_the_others():
    async def ask() -> list[str]:
        found, loads = resolver()
        loads.may_end.clear()
        first, second = (asyncio.create_task(found.resolve(ANYONE, "legal")) for _ in range(2))
        while not loads.asked:
            await asyncio.sleep(0)  # until the first of them has begun
        first.cancel()
        loads.may_end.set()
        await second
        return [adapter.name for adapter in loads.registry.adapters]

    assert asyncio.run(ask()) == ["legal"]


def test_nobody_waits_for_ever():
    found, loads = resolver(timeout_s=0.01)

    async def ask() -> None:
        loads.may_end.clear()
        await found.resolve(ANYONE, "legal")

    fault = refusal(ask())
    assert fault.code is FaultCode.TIMED_OUT
    assert fault.message == "Adapter 'legal' is still being loaded after 0.01 seconds; ask again."


def test_only_so_many_names_are_looked_for_at_once():
    async def ask() -> None:
        found, loads = resolver()
        loads.may_end.clear()
        asks = [asyncio.create_task(found.resolve(ANYONE, f"a{number}")) for number in range(MOST_AT_ONCE)]
        while len(loads.asked) < MOST_AT_ONCE:
            await asyncio.sleep(0)  # until all of them have begun
        try:
            await found.resolve(ANYONE, "one-more")
        finally:
            loads.may_end.set()
            await asyncio.gather(*asks)

    assert refusal(ask()).code is FaultCode.QUEUE_FULL


def test_a_name_without_an_adapter_is_not_looked_for_again_at_once():
    clock = [0.0]
    found, loads = resolver(legal=NothingError("There is nothing."), now=lambda: clock[0])
    for now in (0.0, 1.0, MISSED_S, MISSED_S + 1.0):
        clock[0] = now
        asyncio.run(found.resolve(ANYONE, "legal"))
    assert len(loads.asked) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AdapterError("s3://bucket/adapters/legal/adapter_config.json is odd."), FaultCode.ADAPTER_FAILED),
        (UnreachableError("The store of s3://bucket/adapters/legal is odd."), FaultCode.SOURCE_AWAY),
        (DiskError("The disk for s3://bucket/adapters/legal is odd.", FaultCode.DISK_FULL), FaultCode.DISK_FULL),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_with_the_reason(error, code):
    found, _ = resolver(legal=error)
    fault = refusal(found.resolve(key(), "legal", "lora_path"))
    assert (fault.code, fault.param) == (code, "lora_path")
    assert fault.message.startswith("Adapter 'legal' could not be loaded: ")
    assert fault.message.endswith("is odd.")
    assert "s3://" not in fault.message


def test_a_key_loads_only_names_that_it_may_use():
    found, loads = resolver()
    asyncio.run(found.resolve(key(adapters=frozenset({"mine-*"})), "legal"))
    assert loads.asked == [], "whoever looks for the name says that the key may not use it"
    asyncio.run(found.resolve(key(adapters=frozenset({"mine-*"})), "mine-1"))
    assert len(loads.asked) == 1


def test_a_key_with_a_root_reaches_nothing_outside_of_it():
    found, loads = resolver()
    acme = key(adapter_root="s3://bucket/adapters/acme")
    for model in ("acme2/legal", "legal", "beta/legal"):
        assert refusal(found.resolve(acme, model)).code is FaultCode.FORBIDDEN
    asyncio.run(found.resolve(acme, "acme/legal"))
    assert [one.name for one in loads.asked] == ["acme/legal"]


def test_roots_and_prefixes_of_two_kinds_do_not_meet(tmp_path: Path):
    entry = Prefix(str(tmp_path)).entry("acme/legal")
    assert is_within(entry, str(tmp_path / "acme"))
    assert not is_within(entry, str(tmp_path / "acm"))
    assert not is_within(entry, "s3://bucket/acme")


@pytest.mark.parametrize("place", ["/nowhere/at/all", "ftp://host/a", "s3://b/../c"])
def test_a_prefix_that_cannot_be_is_refused_at_the_start(place):
    with pytest.raises(ConfigError, match="lora_resolver"):
        Prefix(place)


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    """A server with a folder of adapters that it was not told of."""
    disk = tmp_path_factory.mktemp("disk")
    write_byte_tokenizer(disk / "tiny")
    for number in range(20):
        (disk / "adapters" / f"a{number}").mkdir(parents=True)
        (disk / "adapters" / f"a{number}" / "adapter_config.json").write_text("{}")
    (disk / "adapters" / "a17").rename(disk / "adapters" / "acme-1")
    (disk / "adapters" / "team").mkdir()
    (disk / "adapters" / "a18").rename(disk / "adapters" / "team" / "acme-2")
    rooted = key(adapters=frozenset({"acme-*", "team/acme-*"}), adapter_root=str(disk / "adapters" / "team"))
    few = key(adapters=frozenset({"a1", "none"}))
    keys = KeyRing({digest_of("all"): Key("all"), digest_of("few"): few, digest_of("rooted"): rooted})
    registry = Registry("tiny", str(disk / "tiny"))
    app = made_app(
        engines(letters_device),
        Tokenizer(disk / "tiny"),
        registry,
        access=Access(registry, keys),
        prefix=Prefix(str(disk / "adapters")),
    )
    with running(app) as url, httpx.Client(base_url=url) as client:
        client.headers["x-api-key"] = "all"
        yield client


SAY = [{"role": "user", "content": "a"}]
APIS = {
    "/v1/chat/completions": {"messages": SAY, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/messages": {"messages": SAY, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/api/chat": {"messages": SAY, "stream": False, "options": {"num_predict": 2}},
    "/tokenize": {"prompt": "a"},
}


@pytest.mark.parametrize(("number", "route"), list(enumerate(APIS, start=2)))
def test_every_api_loads_on_the_first_request(client, number, route):
    got = client.post(route, json={"model": f"a{number}", **APIS[route]})
    assert got.status_code == 200, got.text
    assert f"a{number}" in [model["id"] for model in client.get("/v1/models").json()["data"]]


def test_sglangs_routes_load_on_the_first_request(client):
    body = {"text": ["a", "b"], "lora_path": ["a12", "a13"], "sampling_params": {"max_new_tokens": 2}}
    assert client.post("/generate", json=body).status_code == 200
    chat = {"model": "tiny", "lora_path": "a14", **APIS["/v1/completions"]}
    assert client.post("/v1/completions", json=chat).status_code == 200


def test_a_name_without_an_adapter_is_not_found(client):
    body = {"model": "none", **APIS["/v1/completions"]}
    for secret in ("all", "few"):
        got = client.post("/v1/completions", json=body, headers={"x-api-key": secret})
        assert got.status_code == 404
        assert got.json()["error"]["message"].startswith("There is no model or adapter named 'none'")


def test_a_key_that_may_not_use_a_name_does_not_load_it(client):
    body = {"model": "a15", **APIS["/v1/completions"]}
    assert client.post("/v1/completions", json=body, headers={"x-api-key": "few"}).status_code == 403
    assert "a15" not in client.get("/v1/models").text


@pytest.mark.parametrize(
    ("model", "status"),
    [("team/acme-2", 200), ("acme-1", 403), ("team/../acme-1", 403), ("team/acme-%2e%2e/acme-1", 404), ("a19", 403)],
)
def test_a_key_with_a_root_loads_nothing_outside_of_it_over_http(client, model, status):
    body = {"model": model, **APIS["/v1/completions"]}
    got = client.post("/v1/completions", json=body, headers={"x-api-key": "rooted"})
    assert got.status_code == status, got.text
    loaded = {one["id"] for one in client.get("/v1/models").json()["data"]}
    assert loaded.isdisjoint({"acme-1", "a19"})


def test_a_question_about_a_name_loads_nothing(client):
    assert client.get("/v1/models/a16").status_code == 404
    assert "a16" not in client.get("/v1/models").text


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """Two tenants' roots; acme has links to what is birds', and to what is its own."""
    for name in ("acme/mine", "birds/secret"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    links = {"own": "mine", "link": "../birds/secret", "dangling": "../birds/nothing", "gone": "nothing"}
    for name, target in links.items():
        (tmp_path / "acme" / name).symlink_to(target)
    return tmp_path


def test_what_lies_in_a_keys_root_must_not_lead_out_of_it_whoever_asks(roots: Path):
    names = "acme/mine", "birds/secret", "acme", "other/one"
    owners = {str(roots / "acme"): "acme", str(roots / "birds"): None}
    entries = [Prefix(str(roots)).entry(name, owners) for name in names]

    assert [entry.root for entry in entries] == [str(roots / root) for root in ("acme", "birds", "acme", "")]
    assert [entry.owner for entry in entries] == ["acme", None, "acme", None], "what lies in a tenant's root is its own"


def test_what_leads_out_of_a_root_is_not_looked_at(roots: Path):
    prefix = Prefix(str(roots))
    names = ("mine", "own", "nothing", "gone", "link", "dangling")
    missing = [name for name in names if prefix.is_missing(prefix.entry(f"acme/{name}", {str(roots / "acme"): "acme"}))]

    assert missing == ["nothing", "gone"]


def test_every_load_has_its_line_in_the_audit_log(caplog, roots: Path):
    caplog.set_level(logging.INFO, "rota.audit")
    found, _ = resolver(
        str(roots), roots=lambda: {str(roots / "acme"): "acme"}, **{"acme/link": AdapterError("It is odd.")}
    )
    acme = key(adapter_root=str(roots / "acme"))
    for name in ("acme/mine", "acme/nothing", "acme/link", "birds/secret"):
        with suppress(RequestError):
            asyncio.run(found.resolve(acme, name, client="10.0.0.7"))

    shown = {"action": "load", "key": "acme", "client": "10.0.0.7", "resolved": True}
    forbidden = "Key 'acme' may not use 'birds/secret': it lies outside of the key's adapter root."
    outcomes = {"acme/mine": "ok", "acme/link": "It is odd.", "birds/secret": forbidden}
    assert [record.fields for record in caplog.records] == [
        {**shown, "adapter": name, "path": str(roots / name), "outcome": outcome} for name, outcome in outcomes.items()
    ]
