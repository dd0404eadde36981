"""Over HTTP an adapter comes from the adapter root or not at all, whatever the path looks like."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from rota.core.lora_paths import LoraPath
from rota.llm.config import build_device, engine_config
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.applications import made_app
from tests.server.engines import engines
from tests.server.letters import error_of, serving
from tests.server.running import running
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A root with one adapter and two traps, and an adapter outside of it that counts as built in."""
    folder = tmp_path_factory.mktemp("disk")
    model = make_tiny_model(write_byte_tokenizer(folder / "tiny"), "smollm2")
    root = folder / "root"
    make_adapter(root / "pirate", model, seed=1)
    make_adapter(folder / "secret", model, seed=2)
    (root / "link").symlink_to(folder / "secret")
    shutil.copytree(root / "pirate", root / "trap")
    (root / "trap" / "adapter_model.safetensors").unlink()
    (root / "trap" / "adapter_model.safetensors").symlink_to(folder / "secret" / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def client(folder) -> Iterator[httpx.Client]:
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 32, "max_running_requests": 2}
    options |= {"model_path": str(folder / "tiny"), "adapter_root": str(folder / "root")}
    config = engine_config(options, quiet=True)
    registry = Registry("tiny", str(folder / "tiny"))
    builtin = registry.add(LoraPath(name="parrot", path=str(folder / "secret"), is_builtin=True))
    service = EngineClient(engines(partial(build_device, config), config), [builtin])
    with (
        running(made_app(service, Tokenizer(folder / "tiny"), registry)) as url,
        httpx.Client(base_url=url) as client,
    ):
        service.wait_until_ready(TIMEOUT_S)
        yield client


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "pirate/../../secret",
        "{folder}/secret",
        "{root}/../secret",
        "link",
        "{root}/link",
        "trap",
        "/etc",
    ],
)
@pytest.mark.parametrize("route", ["/v1/load_lora_adapter", "/load_lora_adapter"])
def test_no_path_leads_out_of_the_root(client, folder, route, path):
    refused = client.post(
        route, json={"lora_name": "thief", "lora_path": path.format(folder=folder, root=folder / "root")}
    )

    assert refused.status_code == 400
    assert "outside the adapter root" in refused.text
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "parrot"]


def test_what_came_with_rota_is_served_although_it_lies_outside_the_root(client):
    answered = client.post("/v1/completions", json={"model": "parrot", "prompt": "a", "max_tokens": 1})

    assert answered.status_code == 200


@pytest.mark.parametrize("path", ["pirate", "./pirate", "{root}/pirate"])
def test_what_lies_in_the_root_is_loaded(client, folder, path):
    loaded = client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": "pirate", "lora_path": path.format(folder=folder, root=folder / "root")},
    )
    unloaded = client.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})

    assert (loaded.status_code, unloaded.status_code) == (200, 200)


@pytest.mark.parametrize("route", ["/v1/load_lora_adapter", "/load_lora_adapter"])
def test_a_server_that_lets_others_in_loads_nothing_over_http_without_a_root(tmp_path, route):
    with serving(tmp_path, load_refusal="Name a root.") as client:
        refused = client.post(route, json={"lora_name": "owl", "lora_path": "/owl"})

    assert (refused.status_code, error_of(refused)["message"]) == (403, "Name a root.")
