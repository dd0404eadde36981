"""A name gets new versions while it serves, also when its files changed, and each answers as PEFT does."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from rota.core.adapter import Adapter, changed_since
from rota.core.config import ServerConfig
from rota.core.errors import FaultCode
from rota.core.lora_paths import LoraPath
from rota.core.messages import AdapterFailed, AdapterFetched, Message
from rota.core.plan import StepPlan
from rota.llm.config import build_device, engine_config
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.answers.respond import VERSION_HEADER
from rota.text.tokenizer import Tokenizer
from tests.builders import capacity
from tests.engine.lora.adapter_factory import greedy_answer, load_with_peft, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.fakes import FakeDevice, FakeTicket, alphabet
from tests.server.applications import made_app, running
from tests.server.endless import ENDLESS, after
from tests.server.engines import REPLICAS, engines
from tests.server.letters import CONTEXT, counts, error_of, events_in, serving, speaks
from tests.server.versions.serving import LenientDevice, SlowDevice, ask, put, send, versions
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

STREAMED = {"model": "poet", "prompt": "abc", "max_tokens": ENDLESS, "stream": True}
MAY_END = threading.Event()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def next_letter(tokens: Sequence[int]) -> int:
    return 2 if MAY_END.is_set() else after(tokens)


@pytest.fixture
def device() -> SlowDevice:
    MAY_END.clear()
    return SlowDevice(next_token=next_letter)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> Iterator[httpx.Client]:
    """A client of a server whose tests change nothing."""
    with serving(tmp_path_factory.mktemp("model"), adapters=("poet", "pirate")) as client:
        yield client


@pytest.fixture
def client(tmp_path, device) -> Iterator[httpx.Client]:
    with serving(tmp_path, device, adapters=("poet", "pirate")) as client:
        yield client


def test_a_new_version_takes_the_name_and_answers_say_which_gave_them(client):
    assert ask(client, "poet").headers[VERSION_HEADER] == "1"
    assert put(client, "poet").json() == {"name": "poet", "version": 2, "previous": 1, "current": 2}

    assert ask(client, "poet").headers[VERSION_HEADER] == "2"
    assert ask(client, "letters:poet@2").headers[VERSION_HEADER] == "2"
    assert ask(client, "pirate", stream=True).headers[VERSION_HEADER] == "1"
    assert VERSION_HEADER not in ask(client, "letters").headers
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["letters", "poet", "pirate"]


def test_put_loads_a_name_that_is_new(client):
    assert put(client, "parrot").json() == {"name": "parrot", "version": 1, "previous": None, "current": 1}
    assert ask(client, "parrot").status_code == 200


def test_an_old_version_without_users_leaves_and_is_remembered(client):
    put(client, "poet")
    assert until(lambda: versions(client, "poet") == {2: "current"})
    assert [one["version"] for one in client.get("/v1/adapters/poet").json()["history"]] == [1]

    refused = ask(client, "poet@1")
    assert (refused.status_code, "no model or adapter named 'poet@1'" in error_of(refused)["message"]) == (404, True)


def test_an_answer_goes_on_under_the_version_it_began_with_which_takes_requests_until_then(client, device):
    with client.stream("POST", "/v1/completions", json=STREAMED) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert put(client, "poet").status_code == 200
        assert versions(client, "poet") == {2: "current", 1: "leaving"}
        assert ask(client, "poet").headers[VERSION_HEADER] == "2"
        assert ask(client, "poet@1").headers[VERSION_HEADER] == stream.headers[VERSION_HEADER] == "1"
    assert until(lambda: versions(client, "poet") == {2: "current"}), "the old version has not left"
    assert [seat.adapter_id for plan in device.plans for seat in plan.seats] == [1, 3, 1]


def test_the_old_version_serves_while_the_new_one_is_read(client, device):
    with ThreadPoolExecutor(1) as threads:
        updating = threads.submit(put, client, "poet", "/a/slow")
        assert until(lambda: len(device.unread) == REPLICAS)
        assert ask(client, "poet").headers[VERSION_HEADER] == "1"
        assert ask(client, "poet@2").status_code == 404
        device.read()
        assert updating.result().json()["current"] == 2
    assert ask(client, "poet").headers[VERSION_HEADER] == "2"


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_with_mode_switch_a_running_answer_goes_on_under_the_new_version_and_names_both(tmp_path, kv):
    MAY_END.clear()
    device = LenientDevice(next_token=next_letter)
    with serving(tmp_path, device, adapters=("poet",)) as client:
        asked = STREAMED | {"stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=asked) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            assert put(client, "poet", mode="switch", kv=kv).json()["current"] == 2
            moved_at = len(device.plans)
            assert until(lambda: len(device.plans) > moved_at + 3)
            MAY_END.set()
            events = events_in([first, *lines])
        (move,) = events[-1]["rota"]["moves"]
        assert (move["choice"], move["from"], move["to"], move["kv"]) == (0, 1, 2, kv)
        assert 0 < move["token"] < events[-1]["usage"]["completion_tokens"]
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert "abc" + text == (LETTERS * len(text))[: 3 + len(text)]
        assert [seat.adapter_id for plan in device.plans for seat in plan.seats] == [1, 2]
        assert until(lambda: versions(client, "poet") == {2: "current"})


def test_a_whole_answer_that_was_moved_has_both_versions_in_its_header(client, device):
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, client, "poet", max_tokens=ENDLESS)
        assert until(lambda: any(plan.decodes for plan in device.plans))
        put(client, "poet", mode="switch")
        assert until(lambda: any(seat.adapter_id == 3 for plan in device.plans for seat in plan.seats))
        MAY_END.set()
        answer = asking.result()
    assert answer.headers[VERSION_HEADER] == "1, 2"
    assert [(move["from"], move["to"]) for move in answer.json()["rota"]["moves"]] == [(1, 2)]


SAID = [{"role": "user", "content": "abc"}]
SHAPES = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": ENDLESS},
    "/v1/messages": {"messages": SAID, "max_tokens": ENDLESS},
    "/v1/responses": {"input": "abc", "max_output_tokens": ENDLESS},
    "/api/chat": {"messages": SAID, "stream": False, "options": {"num_predict": ENDLESS}},
    "/api/generate": {"prompt": "abc", "options": {"num_predict": ENDLESS}},
}


def test_every_api_tells_of_a_move_in_the_field_rota(client, device):
    with ThreadPoolExecutor(len(SHAPES)) as threads:
        asking = {
            route: threads.submit(client.post, route, json={"model": "poet", **body}) for route, body in SHAPES.items()
        }
        assert until(lambda: counts(client)["running"] == len(SHAPES))
        put(client, "poet", mode="switch")
        moved = [3] * len(SHAPES)
        assert until(lambda: [seat.adapter_id for plan in device.plans for seat in plan.seats][-len(moved) :] == moved)
        MAY_END.set()
        last = {route: json.loads(asked.result().text.splitlines()[-1]) for route, asked in asking.items()}
    for route in ("/v1/messages", "/v1/responses"):
        last[route] = last[route]["usage"]  # where their streams have room
    moves = {route: [(move["from"], move["to"]) for move in told["rota"]["moves"]] for route, told in last.items()}
    assert moves == {route: [(1, 2)] for route in SHAPES}


def test_the_field_rota_is_described(untouched):
    schemas = untouched.get("/openapi.json").json()["components"]["schemas"]
    assert set(schemas["MoveBody"]["properties"]) == {"choice", "from", "to", "token", "kv"}
    bodies = ("CompletionBody", "ChatBody", "MessageUsageBody", "ResponseUsageBody", "MetaInfo", "OllamaBody")
    assert all("rota" in schemas[body]["properties"] for body in bodies)


@pytest.mark.parametrize("path", ["/a/broken", "/a/rotten"])
def test_an_update_that_fails_changes_nothing(client, path):
    refused = put(client, "poet", path)

    assert (refused.status_code, path in error_of(refused)["message"]) == (400, True)
    assert versions(client, "poet") == {1: "current"}
    assert ask(client, "poet").headers[VERSION_HEADER] == "1"
    assert put(client, "poet").json()["version"] == 3


def test_a_version_is_staged_used_and_left_again(client):
    assert put(client, "poet", mode="stage").json() == {"name": "poet", "version": 2, "previous": 1, "current": 1}
    assert versions(client, "poet") == {2: "kept", 1: "current"}
    assert [ask(client, name).headers[VERSION_HEADER] for name in ("poet", "poet@2")] == ["1", "2"]

    assert put(client, "poet", None, version=2, keep_old=True).json()["current"] == 2
    assert versions(client, "poet") == {2: "current", 1: "kept"}
    assert put(client, "poet", None, version=1).json()["current"] == 1
    assert until(lambda: versions(client, "poet") == {1: "current"})


def test_one_version_is_removed_and_the_others_stay(client):
    put(client, "poet", keep_old=True)
    assert client.delete("/v1/adapters/poet@1").json() == {"name": "poet", "versions": [1], "is_gone": True}
    assert versions(client, "poet") == {2: "current"}

    refused = client.delete("/v1/adapters/poet@2")
    assert (refused.status_code, "means version 2 now" in error_of(refused)["message"]) == (400, True)
    assert client.delete("/v1/adapters/poet").json() == {"name": "poet", "versions": [2], "is_gone": True}
    assert client.delete("/v1/adapters/poet").status_code == 404
    assert client.get("/v1/adapters/poet").status_code == 404


def test_unloading_a_name_while_its_next_version_is_read_takes_both(client, device):
    with ThreadPoolExecutor(2) as threads:
        updating = threads.submit(put, client, "poet", "/a/slow")
        assert until(lambda: len(device.unread) == REPLICAS)
        removing = threads.submit(client.delete, "/v1/adapters/poet")
        assert until(lambda: ask(client, "poet").status_code == 404)
        device.read()
        assert "was unloaded before it was read" in error_of(updating.result())["message"]
        assert removing.result().json()["is_gone"]
    assert put(client, "poet").json()["version"] == 3


def test_updates_of_one_name_come_one_after_the_other(client):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: put(client, "poet", f"/a/{number}").json(), range(8)))

    assert sorted(answer["version"] for answer in answers) == list(range(2, 10))
    assert all(answer["current"] >= answer["version"] for answer in answers)
    assert until(lambda: versions(client, "poet") == {9: "current"})


def test_vllms_load_inplace_gives_a_loaded_name_a_new_version(client):
    body = {"lora_name": "poet", "lora_path": "/adapters/new"}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 400
    assert client.post("/v1/load_lora_adapter", json=body | {"load_inplace": True}).status_code == 200
    assert ask(client, "poet").headers[VERSION_HEADER] == "2"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "path", "either path, for a new version, or version"),
        ({"path": "/a", "version": 1}, "path", "either path"),
        ({"version": 9}, "version", "no version 9 of 'poet'; there are: 1"),
        ({"version": 1, "mode": "stage"}, "mode", "mode 'stage' is for a new version"),
        ({"version": 1, "pinned": True}, "pinned", "one that is there keeps its own"),
        ({"path": "/a", "mode": "stage", "keep_old": True}, "keep_old", "says nothing with mode 'stage'"),
        ({"path": "/a", "kv": "keep"}, "kv", "it needs mode 'switch'"),
        ({"path": "/a", "mode": "jump"}, "mode", "mode"),
        ({"path": "/a", "rank": 8}, "rank", "'rank' is not a field; the fields are"),
        ({"path": "/a", "mode": "stage", "pinned": True}, "pinned", "only one version stays"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(untouched, body, param, words):
    refused = untouched.put("/v1/adapters/poet", json=body)
    assert refused.status_code in (400, 404)
    assert (error_of(refused)["param"], words in error_of(refused)["message"]) == (param, True)
    assert versions(untouched, "poet") == {1: "current"}


@pytest.mark.parametrize("name", ["letters", "base", "letters:new", "new@7", "a" * 201])
def test_a_name_that_no_adapter_can_have_is_refused(untouched, name):
    assert put(untouched, name).status_code == 400


def test_a_pin_stays_with_the_name(tmp_path):
    with serving(tmp_path, FakeDevice(next_token=alphabet)) as client:
        assert put(client, "poet", pinned=True).status_code == 200
        assert put(client, "poet").status_code == 200
        assert client.get("/v1/adapters").json()["data"][0]["pinned"]
        assert "may be pinned" in error_of(put(client, "pirate", pinned=True))["message"]


class Deadly(FakeDevice):
    """Dies of an adapter."""

    def fetch(self, adapter: Adapter) -> Message:
        assert "deadly" not in adapter.path, "so it is"
        return super().fetch(adapter)


def test_an_engine_that_dies_while_it_reads_a_version_says_nothing_of_the_version(tmp_path, capsys):
    with serving(tmp_path, Deadly(next_token=alphabet), adapters=("poet",)) as client:
        refused = put(client, "poet", "/a/deadly")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_died")
    assert "so it is" in capsys.readouterr().err


# ── files that changed ────────────────────────────────────────────────────────────────────────────────────────────────

ACME = Key("acme", frozenset({"acme-*"}), may_operate=False, adapter_root="/adapters/acme")
ACME_RING = KeyRing({digest_of(key.name): key for key in (ACME, Key("operator"))})
CHANGED = "'acme-owl' changed since version 1 was loaded; PUT it again."


class ChangingDevice(FakeDevice):
    """Reads version 1 once. Its files are others when it is to be copied into a slot."""

    def fetch(self, adapter: Adapter) -> Message:
        self.adapters = {**getattr(self, "adapters", {}), adapter.adapter_id: adapter}
        return AdapterFetched(adapter_id=adapter.adapter_id, at=self.now(), seals=(str(adapter.version),))

    def submit(self, plan: StepPlan) -> FakeTicket:
        ticket = super().submit(plan)
        for load in plan.loads:
            adapter = self.adapters[load.adapter_id]
            if adapter.version == 1:
                reason, code = changed_since(adapter), FaultCode.ADAPTER_CHANGED
                self._post(AdapterFailed(adapter_id=load.adapter_id, at=self.now(), reason=reason, code=code))
        return ticket


def changing() -> ChangingDevice:
    return ChangingDevice(next_token=speaks, capacity=capacity(max_sequence_tokens=CONTEXT))


def ask_owl(client: httpx.Client) -> httpx.Response:
    body = {"model": "acme-owl", "prompt": "ab", "max_tokens": 2}
    return client.post("/v1/completions", json=body, headers={"x-api-key": "acme"})


def load(client: httpx.Client) -> dict[str, object]:
    return client.put("/v1/adapters/acme-owl", json={"path": "owl"}, headers={"x-api-key": "acme"}).json()


def states(client: httpx.Client) -> list[str]:
    listed = client.get("/v1/adapters/acme-owl", headers={"x-api-key": "acme"}).json()
    return [one["state"] for one in listed["versions"]]


def test_a_version_that_changed_is_refused_with_409_until_it_is_put_again(tmp_path):
    with serving(tmp_path, changing(), keys=ACME_RING) as client:
        load(client)
        first, later = ask_owl(client), ask_owl(client)
        # Once every replica has found it changed.
        assert until(lambda: ask_owl(client).status_code == 409 and states(client) == ["lost"])
        assert load(client)["version"] == 2
        assert ask_owl(client).status_code == 200

    assert [(one.status_code, error_of(one)["code"]) for one in (first, later)] == [(409, "adapter_changed")] * 2
    assert error_of(first)["message"] == CHANGED
    assert CHANGED in error_of(later)["message"]


def test_with_the_flag_it_becomes_a_new_version_of_the_same_owner(tmp_path, caplog):
    caplog.set_level(logging.INFO, "rota.audit")
    with serving(tmp_path, changing(), keys=ACME_RING, config=ServerConfig(reload_changed=True)) as client:
        load(client)
        assert ask_owl(client).status_code == 409
        assert until(lambda: ask_owl(client).status_code == 200)
        listed = client.get("/v1/adapters/acme-owl", headers={"x-api-key": "operator"}).json()

    assert (listed["version"], listed["owner"]) == (2, "acme")
    *_, line = [record.fields for record in caplog.records if record.name == "rota.audit"]
    assert line == {
        "action": "update",
        "key": "acme",
        "client": "this server",
        "adapter": "acme-owl",
        "path": "owl",
        "reloaded": True,
        "outcome": "ok",
    }


# ── as PEFT ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PROMPT, NEW_TOKENS = (5, 9, 77, 130, 4), 16
ASKED = {"prompt": list(PROMPT), "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}


def test_answers_before_and_after_an_update_are_those_of_peft_with_the_version_they_name(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = {version: make_adapter(tmp_path / str(version), model, seed=version) for version in (1, 2, 3)}
    right = {
        str(version): greedy_answer(load_with_peft(path, model), PROMPT, NEW_TOKENS) for version, path in paths.items()
    }
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4}
    config = engine_config({"model_path": str(folder), **options}, quiet=True)
    registry = Registry("tiny", str(folder))
    first = registry.add(LoraPath(name="poet", path=str(paths[1])))
    service = EngineClient(engines(partial(build_device, config), config), [first])

    with (
        running(made_app(service, Tokenizer(folder), registry)) as url,
        httpx.Client(base_url=url) as client,
    ):
        service.wait_until_ready(TIMEOUT_S)

        def ask(name: str) -> tuple[str, list[int]]:
            body = {**ASKED, "model": name, "return_token_ids": True}
            answer = client.post("/v1/completions", json=body)
            return answer.headers[VERSION_HEADER], answer.json()["choices"][0]["token_ids"]

        given = [ask("poet")]
        assert put(client, "poet", str(paths[2]), keep_old=True).json()["current"] == 2
        given += [ask("poet"), ask("poet@1"), ask("poet")]
        weights, peft_config = (paths[3] / name for name in ("adapter_model.safetensors", "adapter_config.json"))
        sent = send(client, "poet", weights.read_bytes(), config=peft_config.read_text())
        given += [ask("poet"), ask("poet@1")]
        wide = json.dumps(json.loads(peft_config.read_text()) | {"r": 5})
        refused = send(client, "poet", weights.read_bytes(), config=wide)
        given.append(ask("poet"))
        listed = client.get("/v1/adapters/poet").json()["versions"]

    assert sent.json()["current"] == 3
    assert [version for version, _ in given] == ["1", "2", "1", "2", "3", "1", "3"]
    assert all(tokens == right[version] for version, tokens in given)
    assert len({tuple(tokens) for tokens in right.values()}) == 3
    assert refused.status_code == 400
    assert error_of(refused)["message"].startswith("adapter_model.safetensors: the tensor "), (
        "the client has sent no folder"
    )
    assert all(one["bytes"] > 0 for one in listed)
