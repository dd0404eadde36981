"""Adapters come and go over HTTP, and a request is answered by whom it names."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.adapter import Adapter
from rota.core.config import EngineConfig
from rota.core.errors import RequestError
from rota.core.events import AdapterRefused
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.core.messages import Message
from rota.llm.config import build_device, engine_config, first_adapters, locate_model, with_first
from rota.runtime.client import EngineClient
from rota.runtime.in_process import InProcessService
from rota.runtime.registry import Registry
from rota.server.adapters.manager import AdapterManager
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.fakes import FakeDevice, alphabet
from tests.server.applications import made_app, running
from tests.server.engines import REPLICAS, engines
from tests.server.letters import Gate
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, until

Serve = Callable[..., httpx.Client]
PIRATE, POET = AdapterId(1), AdapterId(2)
FIRST = ("pirate", "poet")
STREAMED = {"model": "poet", "prompt": "abc", "max_tokens": 60, "stream": True}


@contextmanager
def serving(folder: Path, device: FakeDevice, timeout_s: float = TIMEOUT_S) -> Iterator[httpx.Client]:
    """A server of letters with two adapters, pirate and poet, around a device."""
    registry = Registry("letters", "/models/letters")
    adapters = [registry.add(LoraPath(name=name, path=f"/adapters/{name}")) for name in FIRST]
    service = EngineClient(engines(lambda: device), adapters)
    app = made_app(service, Tokenizer(write_byte_tokenizer(folder)), registry, unload_timeout_s=timeout_s)
    with running(app) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture
def serve(tmp_path) -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda *device, **options: stack.enter_context(serving(tmp_path, *device, **options))


@pytest.fixture(scope="module")
def device() -> FakeDevice:
    return FakeDevice(next_token=alphabet)


@pytest.fixture(scope="module")
def server(tmp_path_factory, device) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device) as client:
        yield client


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    """Of the file's server, which has its two adapters again afterwards."""
    yield server
    for name in names(server)[3:]:
        unload(server, name).raise_for_status()


GATE = Gate()


class GatedDevice(FakeDevice):
    """Reads no new adapter, and gets no further than a few letters, until the gate is open."""

    def fetch(self, adapter: Adapter) -> Message:
        if "new" in adapter.path:
            assert GATE.wait(TIMEOUT_S)
        return super().fetch(adapter)


@pytest.fixture
def gated() -> GatedDevice:
    GATE.clear()
    return GatedDevice(next_token=GATE)


def ask(client: httpx.Client, model: str | None, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "model": model, **fields})


def load(client: httpx.Client, name: str, path: str = "/adapters/new", **fields: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def names(client: httpx.Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"]]


def message_of(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "adapter", "name"),
    [
        (None, 0, "letters"),
        ("letters", 0, "letters"),
        ("pirate", PIRATE, "pirate"),
        ("letters:poet", POET, "poet"),
    ],
)
def test_a_request_is_answered_by_whom_it_names(client, device, model, adapter, name):
    before = len(device.plans)
    answer = ask(client, model, n=2).json()

    assert [choice["text"] for choice in answer["choices"]] == ["def", "def"]
    assert answer["model"] == name
    assert [seat.adapter_id for plan in device.plans[before:] for seat in plan.seats] == [adapter, adapter]


def test_an_unknown_name_is_404_with_the_known_ones(client, device):
    before = sum(len(plan.seats) for plan in device.plans)
    refused = ask(client, "parrot")

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "known are: letters, pirate, poet" in message_of(refused)
    assert sum(len(plan.seats) for plan in device.plans) == before


def test_the_list_of_models_says_where_each_comes_from(client):
    listed = client.get("/v1/models").json()["data"]

    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        ("letters", "/models/letters", None),
        ("pirate", "/adapters/pirate", "letters"),
        ("poet", "/adapters/poet", "letters"),
    ]
    assert client.get("/v1/models/poet").json() == listed[2]
    assert client.get("/v1/models/parrot").status_code == 404


def test_an_adapter_comes_and_goes_while_the_server_runs(client):
    assert load(client, "parrot").status_code == 200
    assert names(client) == ["letters", "pirate", "poet", "parrot"]
    assert ask(client, "parrot").json()["choices"][0]["text"] == "def"
    assert unload(client, "parrot").text == "Adapter 'parrot' is unloaded."
    assert names(client) == ["letters", "pirate", "poet"]
    assert ask(client, "parrot").status_code == 404


def test_a_name_loaded_again_never_sees_the_kv_of_the_one_before(serve):
    client = serve(FakeDevice())
    prompt = "a prompt of more than sixteen tokens"

    def cached() -> int:
        return ask(client, "poet", prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached()) == (0, 32)
    unload(client, "poet")
    load(client, "poet")
    assert cached() == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"lora_name": "parrot", "lora_path": "/a/broken"}, "/a/broken is broken."),
        ({"lora_name": "poet", "lora_path": "/a/poet"}, "already loaded"),
        ({"lora_name": "letters", "lora_path": "/a/poet"}, "base model's name"),
        ({"lora_name": "letters:poet", "lora_path": "/a/poet"}, "begins with 'letters:'"),
        ({"lora_name": "", "lora_path": "/a/poet"}, "needs a name"),
        ({"lora_name": "base", "lora_path": "/a/poet"}, "cannot be called 'base'"),
        ({"lora_name": "other", "lora_path": "/a/poet"}, "cannot be called 'other'"),
        ({"lora_name": "a\nb", "lora_path": "/a/poet"}, "all of them printable"),
        ({"lora_name": "a" * 201, "lora_path": "/a/poet"}, "at most 200 characters"),
        ({"lora_name": "parrot"}, "lora_path is missing"),
        ({"lora_name": "parrot", "lora_path": 3}, "lora_path should be a valid string"),
        ({"lora_name": "parrot", "lora_path": "/a", "rank": 8}, "'rank' is not a field; the fields are"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/load_lora_adapter", "/load_lora_adapter"])
def test_a_load_that_cannot_be_is_400_with_its_reason_and_leaves_no_name(client, route, body, words):
    refused = client.post(route, json=body)

    assert refused.status_code == 400
    assert words in refused.text
    assert names(client) == ["letters", "pirate", "poet"]


def test_unloading_what_is_not_loaded_is_400_with_what_is(client):
    assert "loaded are: pirate, poet" in message_of(unload(client, "parrot"))
    refused = client.post("/unload_lora_adapter", json={"lora_name": "letters"})
    assert (refused.status_code, refused.json()["success"]) == (400, False)


def test_the_other_shape_lists_what_is_loaded(client):
    new = {"lora_name": "parrot", "lora_path": "/a/parrot"}
    before = {"pirate": "/adapters/pirate", "poet": "/adapters/poet"}

    loaded = client.post("/load_lora_adapter", json=new | {"pinned": True})
    broken = client.post("/load_lora_adapter", json={"lora_name": "owl", "lora_path": "/a/broken"})
    unloaded = client.post("/unload_lora_adapter", json={"lora_name": "parrot"})

    after = before | {"parrot": "/a/parrot"}
    assert loaded.json() == {"success": True, "error_message": None, "loaded_adapters": after}
    assert broken.json() == {"success": False, "error_message": "/a/broken is broken.", "loaded_adapters": after}
    assert unloaded.json() == {"success": True, "error_message": None, "loaded_adapters": before}


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/load_lora_adapter", {"load_inplace": False, "is_3d_lora_weight": False}),
        ("/load_lora_adapter", {"pinned": False, "lora_id": None, "rid": None, "added_tokens_config": None}),
    ],
)
def test_what_other_servers_clients_send_along_is_taken_where_it_changes_nothing(client, route, fields):
    unloading = {"lora_int_id": 3} if "v1" in route else {"lora_id": "3"}

    assert client.post(route, json={"lora_name": "parrot", "lora_path": "/a/parrot", **fields}).status_code == 200
    assert client.post(route.replace("load", "unload", 1), json={"lora_name": "parrot", **unloading}).status_code == 200


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/v1/load_lora_adapter", "is_3d_lora_weight"),
        ("/load_lora_adapter", "added_tokens_config"),
    ],
)
def test_what_would_change_the_load_and_cannot_is_refused_by_its_name(client, route, field):
    refused = client.post(route, json={"lora_name": "parrot", "lora_path": "/a/parrot", field: True})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert "parrot" not in names(client)


def test_pins_are_kept_and_the_last_slot_is_never_pinned(client):
    def pin(name: str) -> dict[str, Any]:
        body = {"lora_name": name, "lora_path": f"/a/{name}", "pinned": True}
        return client.post("/load_lora_adapter", json=body).json()

    assert pin("parrot")["success"]
    assert "at most 1 may be pinned" in pin("owl")["error_message"]


def test_an_unload_makes_the_name_unknown_at_once_and_waits_for_whoever_runs(serve, gated):
    client = serve(gated)
    with ThreadPoolExecutor(1) as threads, client.stream("POST", "/v1/completions", json=STREAMED) as stream:
        lines = stream.iter_lines()
        next(lines)
        unloading = threads.submit(unload, client, "poet")
        assert until(lambda: "poet" not in names(client)), "its name is still known"
        assert ask(client, "poet").status_code == 404
        assert not unloading.done()
        GATE.set()
        assert list(lines)[-2] == "data: [DONE]"
        assert unloading.result().text == "Adapter 'poet' is unloaded."


def test_an_unload_whose_users_take_too_long_goes_on_in_the_background(serve, gated):
    client = serve(gated, timeout_s=0.05)
    with client.stream("POST", "/v1/completions", json=STREAMED) as stream:
        lines = stream.iter_lines()
        next(lines)
        answer = unload(client, "poet")
        assert (answer.status_code, "in the background" in answer.text) == (200, True)
        GATE.set()
        assert load(client, "poet").status_code == 200
        assert ask(client, "poet").status_code == 200
        assert list(lines)[-2] == "data: [DONE]"


def test_of_many_who_load_one_name_at_once_one_wins(client):
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: load(client, "parrot", f"/a/{number}"), range(8)))

    assert sorted(answer.status_code for answer in answers) == [200] + [400] * 7
    (winner,) = [f"/a/{number}" for number, answer in enumerate(answers) if answer.status_code == 200]
    assert client.get("/v1/models/parrot").json()["root"] == winner


def test_a_request_for_an_adapter_that_is_being_read_waits_for_it(serve, gated):
    client = serve(gated)
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(load, client, "parrot")
        assert until(lambda: "parrot" in names(client)), "its name is not known yet"
        asking = threads.submit(ask, client, "parrot")
        GATE.set()

        assert (loading.result().status_code, asking.result().status_code) == (200, 200)


def test_an_adapter_unloaded_while_it_is_read_is_gone_and_whoever_loaded_it_hears_so(serve, gated):
    client = serve(gated)
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(load, client, "parrot")
        assert until(lambda: "parrot" in names(client)), "its name is not known yet"
        unloading = threads.submit(unload, client, "parrot")
        assert until(lambda: "parrot" not in names(client)), "its name is still known"
        GATE.set()

        assert "was unloaded before it was read" in message_of(loading.result())
        assert unloading.result().status_code == 200


def test_requests_that_race_with_loads_and_unloads_all_end(client):
    def act(seed: int) -> list[int]:
        dice = random.Random(seed)
        actions = [
            lambda: load(client, "parrot"),
            lambda: load(client, "parrot", "/a/broken"),
            lambda: unload(client, "parrot"),
            lambda: ask(client, "parrot", n=2),
            lambda: ask(client, "parrot", stream=True),
        ]
        answers = [dice.choice(actions)() for _ in range(25)]
        assert all(answer.text for answer in answers)
        return [answer.status_code for answer in answers]

    with ThreadPoolExecutor(6) as threads:
        statuses = {status for seen in threads.map(act, range(6)) for status in seen}

    assert statuses <= {200, 400, 404}
    assert 200 in statuses
    assert ask(client, "poet").status_code == 200


class BreakingDevice(FakeDevice):
    """Dies of an adapter."""

    def fetch(self, adapter: Adapter) -> Message:
        if "new" in adapter.path:
            raise ZeroDivisionError("a kernel went wrong")
        return super().fetch(adapter)


@pytest.mark.usefixtures("capsys")
def test_whoever_loads_an_adapter_hears_when_the_engine_dies_of_it(serve):
    client = serve(BreakingDevice())

    assert "a kernel went wrong" in message_of(load(client, "parrot"))
    assert "parrot" not in names(client)
    assert load(client, "parrot").status_code == 503
    assert unload(client, "poet").status_code == 503


def test_an_adapter_that_is_refused_after_it_was_served_is_unknown_from_then_on():
    registry = Registry("letters", "/models/letters")
    adapter = registry.add(LoraPath(name="poet", path="/adapters/poet"))
    front = AdapterManager(InProcessService(FakeDevice, EngineConfig()), registry)
    front.observe([AdapterRefused(adapter_id=adapter.adapter_id, at=0.0, reason="Its folder is gone.")])

    with pytest.raises(RequestError, match="no model or adapter named 'poet'"):
        registry.find("poet")


# ── slots by need ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_later_adapter_of_a_larger_rank_is_refused_with_the_flag_that_helps(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = {name: str(make_adapter(tmp_path / name, model, r=rank)) for name, rank in (("a", 8), ("b", 4), ("c", 12))}
    paths["dora"] = str(make_adapter(tmp_path / "dora", model, use_dora=True))
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4}
    config = locate_model(engine_config({"model_path": str(folder), "lora_paths": [paths["a"]], **options}, quiet=True))
    config = with_first(config, first_adapters(config))
    registry = Registry("tiny", str(folder))
    first = [registry.add(entry) for entry in first_adapters(config)]
    service = EngineClient(engines(partial(build_device, config), config), first)
    with (
        running(made_app(service, Tokenizer(folder), registry)) as url,
        httpx.Client(base_url=url) as client,
    ):
        service.wait_until_ready(TIMEOUT_S)
        loaded, refused = (
            client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": paths[name]}) for name in "bc"
        )
        info = client.get("/server_info").json()
        client.put("/v1/adapters/dora", json={"path": paths["dora"]}).raise_for_status()
        for _ in range(REPLICAS):  # each grows with its first request for it
            client.post("/v1/completions", json={"model": "dora", "prompt": "a", "max_tokens": 1}).raise_for_status()
        grown = client.get("/server_info").json()

    assert loaded.status_code == 200
    assert refused.status_code == 400
    assert "rank 12, over the limit of 8 that slots were made for; start the server with --max-lora-rank 12" in (
        refused.text
    )
    assert sorted(info["loaded_adapters"]) == ["a", "b"]
    assert info["slots"] == {
        "count": 8,
        "from": "1 adapter at the start",
        "rank": 8,
        "rank_from": "the largest at the start",
        "pages": 0,
        "matrices": 0,
        "bytes": info["lora_memory_bytes"],
        "annexed": [],
        "warning": None,
    }
    assert grown["slots"]["bytes"] == grown["lora_memory_bytes"] > info["lora_memory_bytes"], "what slots take now"
    assert max(state["slot_bytes"] for state in grown["internal_states"]) == grown["lora_memory_bytes"]
