"""Over HTTP an adapter comes from the root of its server or its key, and no answer tells what lies beside that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.adapter import Adapter
from rota.core.lora_paths import LoraPath
from rota.core.messages import AdapterFailed, Message
from rota.core.plan import StepPlan
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.fakes import FakeDevice, FakeTicket
from tests.server.letters import error_of, events_of, serving
from tests.server.models import serving_model
from tests.tiny_tokenizer import write_byte_tokenizer

SMALL = {"kv_blocks": 32, "max_running_requests": 2}


# ── the root of a server ──────────────────────────────────────────────────────────────────────────────────────────────


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
def rooted(folder) -> Iterator[httpx.Client]:
    builtin = LoraPath(name="parrot", path=str(folder / "secret"), is_builtin=True)
    with serving_model(folder / "tiny", [builtin], adapter_root=str(folder / "root"), **SMALL) as client:
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
def test_no_path_leads_out_of_the_root(rooted, folder, route, path):
    refused = rooted.post(
        route, json={"lora_name": "thief", "lora_path": path.format(folder=folder, root=folder / "root")}
    )

    assert refused.status_code == 400
    assert "outside the adapter root" in refused.text
    assert [model["id"] for model in rooted.get("/v1/models").json()["data"]] == ["tiny", "parrot"]


def test_what_came_with_rota_is_served_although_it_lies_outside_the_root(rooted):
    answered = rooted.post("/v1/completions", json={"model": "parrot", "prompt": "a", "max_tokens": 1})

    assert answered.status_code == 200


@pytest.mark.parametrize("path", ["pirate", "./pirate", "{root}/pirate"])
def test_what_lies_in_the_root_is_loaded(rooted, folder, path):
    loaded = rooted.post(
        "/v1/load_lora_adapter",
        json={"lora_name": "pirate", "lora_path": path.format(folder=folder, root=folder / "root")},
    )
    unloaded = rooted.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})

    assert (loaded.status_code, unloaded.status_code) == (200, 200)


@pytest.mark.parametrize("route", ["/v1/load_lora_adapter", "/load_lora_adapter"])
def test_a_server_that_lets_others_in_loads_nothing_over_http_without_a_root(tmp_path, route):
    with serving(tmp_path, load_refusal="Name a root.") as client:
        refused = client.post(route, json={"lora_name": "owl", "lora_path": "/owl"})

    assert (refused.status_code, error_of(refused)["message"]) == (403, "Name a root.")


# ── the root of a key ─────────────────────────────────────────────────────────────────────────────────────────────────

KEYS = """
[keys.acme]
key = "acme"
adapters = ["parrot", "acme-*", "shared-*"]
may_use_base = true
may_load = true
adapter_root = "acme"

[keys.beta]
key = "beta"
adapters = ["parrot", "beta-*", "shared-*"]
may_load = true
adapter_root = "beta"

[keys.operator]
key = "operator"
adapters = "all"
may_use_base = true
may_load = true
may_operate = true
"""
LOAD = ["/v1/load_lora_adapter", "/load_lora_adapter"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A server's root with two tenants' folders in it, and traps that acme has made in its own."""
    root = tmp_path_factory.mktemp("disk") / "root"
    model = make_tiny_model(write_byte_tokenizer(root.parent / "tiny"), "smollm2")
    acme, beta = root / "acme", root / "beta"
    make_adapter(acme / "pirate", model, seed=1)
    make_adapter(beta / "secret", model, seed=2)
    make_adapter(root / "parrot", model, seed=3)
    links = {
        "inner": "pirate",
        "absolute": str(acme / "pirate"),
        "link": "../beta/secret",
        "dangling": "../beta/nothing",
        "round": "../beta/../acme/pirate",
        "loop": "loop",
        "up": "..",
        "etc": "/etc",
        "chain": "link",
    }
    for name, target in links.items():
        (acme / name).symlink_to(target)
    weights = "adapter_model.safetensors"
    for name, target in {"trap": "../../beta/secret", "missing": "../../beta/nothing"}.items():
        shutil.copytree(acme / "pirate", acme / name)
        (acme / name / weights).unlink()
        (acme / name / weights).symlink_to(f"{target}/{weights}")
    shutil.copytree(acme / "pirate", acme / "indexed")
    (acme / "indexed" / weights).unlink()
    index = {"weight_map": {"a": f"../../beta/secret/{weights}"}}
    (acme / "indexed" / f"{weights}.index.json").write_text(json.dumps(index))
    for name in ("config-out", "config-missing"):
        (acme / name).mkdir()
        where = "secret" if name == "config-out" else "nothing"
        (acme / name / "adapter_config.json").symlink_to(f"../../beta/{where}/adapter_config.json")
    (acme / "empty").mkdir()
    (acme / "bad").mkdir()
    (acme / "bad" / "adapter_config.json").write_text("[")
    (acme / "bad" / "adapter_model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return root


@pytest.fixture(scope="module")
def client(root) -> Iterator[httpx.Client]:
    parrot = LoraPath(name="parrot", path="parrot")
    with serving_model(root.parent / "tiny", [parrot], KEYS, adapter_root=str(root), **SMALL) as client:
        yield client


def load(client: httpx.Client, key: str, name: str, path: str, route: str = LOAD[0]) -> httpx.Response:
    return client.post(route, json={"lora_name": name, "lora_path": path}, headers={"x-api-key": key})


def unload(client: httpx.Client, key: str, name: str, route: str = "/v1/unload_lora_adapter") -> httpx.Response:
    return client.post(route, json={"lora_name": name}, headers={"x-api-key": key})


def ask(client: httpx.Client, key: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "ab", "max_tokens": 2, **fields}
    return client.post("/v1/completions", json=body, headers={"x-api-key": key})


@pytest.mark.parametrize(
    "path", ["pirate", "./pirate", "pirate/", "pirate//", "inner", "absolute", "empty/../pirate", "{acme}/pirate"]
)
@pytest.mark.parametrize("route", LOAD)
def test_a_key_loads_what_lies_in_its_own_root(client, root, route, path):
    loaded = load(client, "acme", "acme-pirate", path.format(acme=root / "acme"), route)

    assert loaded.status_code == 200, loaded.text
    assert ask(client, "acme", "acme-pirate").status_code == 200
    assert unload(client, "acme", "acme-pirate").status_code == 200


OUTSIDE = [
    "../beta/secret",  # another tenant's
    "../beta/nothing",
    "../gamma/secret",
    "../parrot",  # the operator's
    "../../tiny",
    "../acme/pirate",  # leaves and comes back, which would tell the root's own name
    "../beta/../acme/pirate",
    "pirate/../../beta/secret",
    "beta/secret",  # as an operator would say it
    "acme/pirate",
    "{root}/beta/secret",
    "{root}/acme/../beta/secret",
    "{root}",
    "{root}/",
    "{root}/acme-not",
    "/",
    "/etc",
    "/nowhere",
    "//etc",
    "..",
    "../",
    "....//beta",
    "~",
    "~root",
    "file://{root}/beta/secret",
    "%2e%2e/beta/secret",
    "..\\beta\\secret",
    "link",
    "dangling",
    "round",
    "loop",
    "loop/pirate",
    "chain",
    "etc",
    "up/beta/secret",
    "link/../pirate/../../beta/secret",
    "trap",
    "missing",
    "indexed",
    "config-out",
    "config-missing",
    "PIRATE",
    "Pirate",
    "pirate ",
    "pirate/adapter_config.json",
    "pirate/adapter_config.json/..\u2044beta",
    "..\u2215beta\u2215secret",
    "．．/beta/secret",
    "pïrate",
    "pir\u200bate",
    "\u202eetarip",
    "pirate\x00",
    "\x00",
    "../beta/secret\x00pirate",
    "pirate\n",
    "a" * 300,
    "a" * 5000,
    "a/" * 2500,
    "../" * 1666 + "etc",
    "pirate/" + "x/../" * 1000,
    "loop/" * 1000,
]


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("route", LOAD)
def test_what_lies_outside_and_what_does_not_exist_are_refused_in_the_same_bytes(client, root, route, path):
    unknown = load(client, "acme", "acme-thief", "nothing", route)
    refused = load(client, "acme", "acme-thief", path.format(root=root), route)

    assert (refused.status_code, refused.content) == (400, unknown.content)
    assert str(root) not in refused.text
    assert unknown.status_code == 400


@pytest.mark.parametrize("route", LOAD)
def test_half_a_character_in_a_path_is_refused_like_any_other_bad_text(client, route):
    body = b'{"lora_name": "acme-thief", "lora_path": "\\ud800"}'
    refused = client.post(route, content=body, headers={"x-api-key": "acme"})

    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("path", "words"), [("bad", "bad/adapter_config.json cannot be read"), ("empty", "empty is not an adapter folder")]
)
@pytest.mark.parametrize("how", ["{path}", "{acme}/{path}"])
def test_what_is_wrong_in_its_own_folder_is_told_to_a_key_without_the_way_there(client, root, how, path, words):
    refused = load(client, "acme", "acme-bad", how.format(acme=root / "acme", path=path))

    assert words in error_of(refused)["message"]
    assert str(root) not in refused.text


def test_an_operator_loads_from_the_whole_root_and_sees_paths(client, root):
    assert load(client, "operator", "acme-one", "acme/pirate").status_code == 200
    assert load(client, "operator", "beta-one", str(root / "beta" / "secret")).status_code == 200
    assert f"{root / 'nothing'}" in load(client, "operator", "acme-two", "nothing").text
    assert "outside the adapter root" in load(client, "operator", "acme-two", "../tiny").text
    for name in ("acme-one", "beta-one"):
        assert unload(client, "operator", name).status_code == 200


def test_only_an_operator_is_shown_where_models_lie(client, root):
    def seen_by(key: str) -> str:
        headers = {"x-api-key": key}
        paths = ["/v1/models", "/v1/models/parrot", "/v1/models/acme-pirate", "/model_info", "/server_info"]
        texts = [client.get(path, headers=headers).text for path in paths]
        refusals = [ask(client, key, "acme-none"), unload(client, key, "acme-none", "/unload_lora_adapter")]
        return " ".join([*texts, *(refused.text for refused in refusals)])

    loaded = load(client, "acme", "acme-pirate", "pirate", "/load_lora_adapter").json()
    for key in ("acme", "beta"):
        assert str(root.parent) not in seen_by(key)
        roots = {one["id"]: one["root"] for one in client.get("/v1/models", headers={"x-api-key": key}).json()["data"]}
        assert all(name == root for name, root in roots.items()), roots
    assert loaded["loaded_adapters"] == {"parrot": "parrot", "acme-pirate": "acme-pirate"}
    assert str(root.parent) in seen_by("operator")
    assert unload(client, "acme", "acme-pirate").status_code == 200


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_an_adapter_of_the_start_is_the_operators_also_if_its_name_is_on_a_list(client, prefix):
    refused = [
        load(client, "acme", "parrot", "pirate", f"{prefix}/load_lora_adapter"),
        unload(client, "acme", "parrot", f"{prefix}/unload_lora_adapter"),
    ]

    assert [one.status_code for one in refused] == [403, 403]
    assert "it is not this key's own" in error_of(refused[0])["message"]
    assert ask(client, "acme", "parrot").status_code == 200


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_a_key_cannot_unload_or_replace_what_another_key_has_loaded(client, prefix):
    assert load(client, "acme", "shared-one", "pirate").status_code == 200

    assert unload(client, "beta", "shared-one", f"{prefix}/unload_lora_adapter").status_code == 403
    assert load(client, "beta", "shared-one", "secret", f"{prefix}/load_lora_adapter").status_code == 403
    assert ask(client, "beta", "shared-one").status_code == 200
    assert load(client, "acme", "shared-one", "pirate").status_code == 400
    assert unload(client, "operator", "shared-one").status_code == 200
    assert load(client, "beta", "shared-one", "secret").status_code == 200
    assert unload(client, "beta", "shared-one").status_code == 200


ACME = Key("acme", frozenset({"pirate", "acme-*"}), may_operate=False, adapter_root="/adapters/acme")
OPERATOR = Key("operator")
RING = KeyRing({digest_of(key.name): key for key in (ACME, OPERATOR)})


def test_the_name_of_an_adapter_of_the_start_stays_the_operators_when_the_adapter_is_gone(tmp_path):
    with serving(tmp_path, keys=RING, adapters=("pirate",)) as client:
        assert unload(client, "operator", "pirate").status_code == 200
        assert load(client, "acme", "pirate", "mine").status_code == 403
        assert load(client, "operator", "pirate", "/adapters/pirate").status_code == 200
        assert unload(client, "acme", "pirate").status_code == 403


def test_a_key_without_a_root_loads_nothing_however_it_was_made(tmp_path):
    ring = KeyRing({digest_of("bare"): Key("bare", may_operate=False)})
    with serving(tmp_path, keys=ring) as client:
        refused = load(client, "bare", "owl", "/adapters/owl")

    assert refused.status_code == 403
    assert "has no adapter_root" in error_of(refused)["message"]


class LosingDevice(FakeDevice):
    """Reads every adapter once, and cannot copy it into a slot."""

    def submit(self, plan: StepPlan) -> FakeTicket:
        ticket = super().submit(plan)
        for one in plan.loads:
            self._post(
                AdapterFailed(
                    adapter_id=one.adapter_id, at=self.now(), reason="/srv/My Adapters/pirate/x.safetensors is gone."
                )
            )
        return ticket


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_adapter_cannot_be_served_is_told_in_full_to_operators_only(tmp_path, stream):
    def message(answer: httpx.Response) -> str:
        return error_of(answer)["message"] if answer.status_code != 200 else events_of(answer)[-1]["error"]["message"]

    with serving(tmp_path, LosingDevice(), keys=RING, adapters=("pirate",)) as client:
        told, shown = (ask(client, key, "pirate", stream=stream) for key in ("acme", "operator"))

    assert message(told) == "The adapter could not be loaded for this request; the server's log says why."
    assert "/srv/My Adapters/pirate/x.safetensors is gone." in message(shown)


class DyingDevice(FakeDevice):
    """Dies of a new adapter, and says where."""

    def fetch(self, adapter: Adapter) -> Message:
        if adapter.path != "/adapters/pirate":
            raise OSError("no space left in /var/cache/rota")
        return super().fetch(adapter)


@pytest.mark.usefixtures("capsys")
def test_why_the_engine_is_down_is_told_to_operators_only(tmp_path):
    with serving(tmp_path, DyingDevice(), keys=RING, adapters=("pirate",)) as client:
        died = load(client, "acme", "acme-owl", "owl")
        down = [load(client, "acme", "acme-owl", "owl"), ask(client, "acme", "pirate")]
        shown = ask(client, "operator", "pirate")

    assert (died.status_code, "/var" in died.text) == (503, False)
    assert [(one.status_code, "/var" in one.text) for one in down] == [(503, False), (503, False)]
    assert "/var/cache/rota" in error_of(shown)["message"]
