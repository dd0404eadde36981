"""Adapters come from an S3 server over HTTP, and a key reaches nothing outside of its own prefix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from rota.core.adapter import Extra
from rota.core.config import LoraConfig
from rota.core.lora_paths import LoraPath
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.ranks import UNKNOWN_RANK, needs_of
from rota.llm.config import build_device, engine_config, locator_for
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.key_file import read_keys
from rota.server.adapters.manager import locating
from rota.sources.sources import sources_for
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import change_config, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.applications import made_app, running
from tests.server.engines import threads
from tests.sources.s3_server import SECRET, S3Server, s3_server
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

KEYS = """
[keys.acme]
key = "acme"
adapters = ["acme-*"]
may_use_base = true
may_load = true
adapter_root = "acme"

[keys.beta]
key = "beta"
adapters = ["beta-*"]
may_load = true
adapter_root = "s3://adapters/tenants/beta"

[keys.operator]
key = "operator"
adapters = "all"
may_use_base = true
may_load = true
may_operate = true
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    pytest.importorskip("moto", reason="moto is not installed, which is the S3 server of these tests")
    pytest.importorskip("obstore", reason="obstore is not installed: the extra `stores`")
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def disk(tmp_path_factory, s3) -> Path:
    """A model, and a bucket with adapters of two tenants, of which one has a neighbour with a similar name."""
    disk = tmp_path_factory.mktemp("disk")
    model = make_tiny_model(write_byte_tokenizer(disk / "tiny"), "smollm2")
    for seed, name in enumerate(("acme/pirate", "acme2/secret", "beta/secret", "acme/odd")):
        folder = make_adapter(disk / "made" / name, model, seed=seed)
        if name.endswith("odd"):
            change_config(folder, use_dora=True, peft_type="LOHA")
        s3.put(f"tenants/{name}", {path.name: path.read_bytes() for path in folder.iterdir()})
    return disk


@pytest.fixture(scope="module")
def client(disk) -> Iterator[httpx.Client]:
    (disk / "keys.toml").write_text(KEYS)
    (disk / "keys.toml").chmod(0o600)
    root = "s3://adapters/tenants"
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 32, "max_running_requests": 2}
    options |= {"model_path": str(disk / "tiny"), "adapter_root": root, "adapter_cache_dir": str(disk / "cache")}
    config = engine_config(options, quiet=True)
    registry = Registry("tiny", str(disk / "tiny"))
    service = threads(partial(build_device, config), config)  # no node of a cluster has this process's credentials
    access = Access(registry, read_keys([], str(disk / "keys.toml"), root))
    locate = locating(locator_for(config.lora))
    with (
        running(made_app(service, Tokenizer(disk / "tiny"), registry, access=access, locate=locate)) as url,
        httpx.Client(base_url=url) as client,
    ):
        service.wait_until_ready(TIMEOUT_S)
        yield client


def load(client: httpx.Client, key: str, name: str, path: str) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path}
    return client.post("/v1/load_lora_adapter", json=body, headers={"x-api-key": key})


def unload(client: httpx.Client, key: str, name: str) -> None:
    client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers={"x-api-key": key}).raise_for_status()


def answer(client: httpx.Client, key: str, model: str) -> str:
    body = {"model": model, "prompt": "ab", "max_tokens": 8, "temperature": 0.0}
    got = client.post("/v1/completions", json=body, headers={"x-api-key": key})
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["text"])


def test_an_adapter_of_a_bucket_is_loaded_and_answers(client):
    assert load(client, "acme", "acme-pirate", "pirate").text == "Adapter 'acme-pirate' is loaded."
    assert load(client, "operator", "acme-same", "s3://adapters/tenants/acme/pirate").status_code == 200
    assert load(client, "operator", "third", "beta/secret").status_code == 200
    answers = {name: answer(client, "operator", name) for name in ("tiny", "acme-pirate", "acme-same", "third")}
    assert answers["acme-pirate"] == answers["acme-same"]
    assert len({answers["tiny"], answers["acme-pirate"], answers["third"]}) == 3
    for name in ("acme-pirate", "acme-same", "third"):
        unload(client, "operator", name)


def upload(s3: S3Server, folder: Path) -> None:
    s3.put("tenants/acme/moving", {path.name: path.read_bytes() for path in folder.iterdir()})


def test_a_name_that_is_loaded_again_means_what_lies_there_now(client, disk, s3):
    said = []
    for made in ("acme/pirate", "beta/secret"):
        upload(s3, disk / "made" / made)
        load(client, "acme", "acme-moving", "moving").raise_for_status()
        said.append(answer(client, "acme", "acme-moving"))
        unload(client, "acme", "acme-moving")
    assert said[0] != said[1]


def test_a_new_version_is_what_lies_there_now(client, disk, s3):
    said = []
    for made in ("acme/pirate", "beta/secret"):
        upload(s3, disk / "made" / made)
        got = client.put("/v1/adapters/acme-moving", json={"path": "moving"}, headers={"x-api-key": "acme"})
        assert got.status_code == 200, got.text
        said.append(answer(client, "acme", "acme-moving"))
    assert said[0] != said[1]
    unload(client, "acme", "acme-moving")


def test_what_a_first_adapter_of_a_bucket_needs_is_seen(disk):
    lora = LoraConfig(adapter_root="s3://adapters/tenants", adapter_cache_dir=str(disk / "cache"))
    entries = [LoraPath(name=path, path=path) for path in ("acme/pirate", "acme/odd", "acme/none")]
    plain, trimmed, missing = needs_of(entries, Brought(lora.adapter_root, sources_for(lora)))
    assert (plain.rank, plain.extras) == (4, Extra.NONE)
    assert trimmed.extras == Extra.GAIN_BIAS
    assert (missing.rank, missing.extras) == (UNKNOWN_RANK, Extra.NONE)


OUTSIDE = [
    "../beta/secret",
    "../acme2/secret",
    "%2e%2e/beta/secret",
    "/etc",
    "s3://adapters/tenants/beta/secret",
    "s3://adapters/tenants/acme2/secret",
    "s3://adapters/tenants/acme/../beta/secret",
    "s3://other/acme/pirate",
    "gs://adapters/tenants/acme/pirate",
    "hf://acme/pirate",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_key_reaches_nothing_outside_of_its_prefix(client, path):
    put = client.put("/v1/adapters/acme-thief", json={"path": path}, headers={"x-api-key": "acme"})
    for refused in (load(client, "acme", "acme-thief", path), put):
        assert refused.status_code == 400
        said = refused.json()["error"]["message"]
        assert "root" in said or "names no place" in said
        assert "tenants" not in said.replace(path, ""), "where the key's root lies is the operator's business"


OTHERS = [
    ("PUT", "/v1/adapters/beta-secret", {"path": "pirate"}, 403),
    ("PUT", "/v1/adapters/beta-secret", {"version": 1}, 403),
    ("PUT", "/v1/adapters/beta-secret@1", {"path": "pirate"}, 403),
    ("PUT", "/v1/adapters/%62eta-secret", {"path": "pirate"}, 403),
    ("PUT", "/v1/adapters/acme-x%2F..%2Fbeta-secret@1", {"path": "../beta/secret"}, 400),
    ("PUT", "/v1/adapters/acme-x@2", {"path": "pirate"}, 400),
    ("DELETE", "/v1/adapters/beta-secret", None, 403),
    ("DELETE", "/v1/adapters/beta-secret@1", None, 403),
    ("GET", "/v1/adapters/beta-secret", None, 403),
    ("GET", "/v1/adapters/beta-secret/route", None, 403),
    ("PUT", "/v1/adapters/beta-secret/route", {"targets": {"acme-own": 1.0}}, 403),
    ("PUT", "/v1/adapters/acme-own/route", {"targets": {"beta-secret": 1.0}}, 403),
    ("PUT", "/v1/adapters/acme-own/route", {"targets": {"acme-own": 0.5, "beta-secret@1": 0.5}}, 403),
    ("PUT", "/v1/adapters/acme-own/route", {"targets": {"acme-own": 1.0}, "shadow": "beta-secret"}, 403),
    ("POST", "/v1/completions", {"model": "beta-secret", "prompt": "a"}, 403),
    ("POST", "/v1/completions", {"model": "beta-secret@1", "prompt": "a"}, 403),
    ("POST", "/generate", {"text": "a", "lora_path": "beta-secret@1"}, 403),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "beta-secret"}, 403),
]


@pytest.fixture(scope="module")
def both(client) -> httpx.Client:
    """Each tenant has an adapter."""
    load(client, "acme", "acme-own", "pirate").raise_for_status()
    load(client, "beta", "beta-secret", "secret").raise_for_status()
    return client


@pytest.mark.parametrize(("verb", "route", "body", "status"), OTHERS)
def test_a_key_reaches_no_adapter_of_another(both, verb, route, body, status):
    refused = both.request(verb, route, json=body, headers={"x-api-key": "acme"})
    assert refused.status_code == status, refused.text
    listed = both.get("/v1/adapters", headers={"x-api-key": "operator"}).json()["data"]
    assert {one["name"]: len(one["versions"]) for one in listed} == {"acme-own": 1, "beta-secret": 1}
    assert both.get("/v1/routes", headers={"x-api-key": "operator"}).json() == {"data": []}


@pytest.mark.parametrize("name", ["beta-secret", "beta-new", "beta-secret@1"])
def test_a_key_sends_no_weights_for_a_name_of_another(both, disk, name):
    weights = (disk / "made" / "acme" / "pirate" / "adapter_model.safetensors").read_bytes()
    headers = {"x-api-key": "acme", "content-type": "application/octet-stream"}
    refused = both.put(f"/v1/adapters/{name}", content=weights, params={"config": "{}"}, headers=headers)
    assert refused.status_code == 403


def test_what_is_wrong_is_told_without_the_place_of_the_root(client, disk):
    assert load(client, "acme", "acme-none", "none").json()["error"]["message"] == "There is nothing at none."
    said = load(client, "acme", "acme-odd", "odd").json()["error"]["message"]
    assert said.startswith("odd/adapter_config.json")
    assert SECRET not in said
    for_operators = load(client, "operator", "odd", "acme/odd").json()["error"]["message"]
    assert for_operators.startswith("s3://adapters/tenants/acme/odd/adapter_config.json")
    assert str(disk) not in for_operators
