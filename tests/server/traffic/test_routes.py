"""Traffic over HTTP: who answers a name, in every API, and who may say so."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.core.ids import AdapterId, Row
from rota.core.lora_paths import LoraPath
from rota.core.plan import NO_TOKEN
from rota.runtime.registry import Registry
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.routes.traffic import first_routes
from tests.fakes import FakeDevice
from tests.observe.scraped import Scrape
from tests.server.engines import REPLICAS
from tests.server.letters import error_of, letters_device, serving
from tests.server.versions.serving import SlowDevice
from tests.waiting import until

LEGAL, NEW, SHADOW = AdapterId(1), AdapterId(2), AdapterId(3)
NAMES = ("legal", "new", "shadow")
HALF = {"targets": {"legal": 0.5, "new": 0.5}}
OPERATOR = Key("operator")
ACME = Key("acme", frozenset({"legal"}), may_operate=False, adapter_root="/a")
RING = KeyRing({digest_of(key.name): key for key in (OPERATOR, ACME)})


@pytest.fixture
def device() -> FakeDevice:
    return letters_device()


@pytest.fixture
def client(tmp_path, device) -> Iterator[httpx.Client]:
    with serving(tmp_path, device, adapters=NAMES) as client:
        yield client


def route(client: httpx.Client, name: str = "legal", **body: Any) -> httpx.Response:
    return client.put(f"/v1/adapters/{name}/route", json=body)


def ask(client: httpx.Client, model: str = "legal", **fields: Any) -> str:
    """The name of the adapter that answers."""
    body = {"model": model, "prompt": "abc", "max_tokens": 2, **fields}
    return client.post("/v1/completions", json=body).raise_for_status().json()["model"]


def test_requests_go_where_the_route_says(client):
    assert route(client, targets={"legal": 0.75, "new": 0.25}).status_code == 200
    assert [ask(client) for _ in range(4)].count("new") == 1
    assert ask(client, "new") == "new"
    assert ask(client, "letters:legal") in ("legal", "new")

    shown = client.get("/v1/adapters/legal/route").json()
    assert (shown["targets"], shown["rollback"]) == ({"legal": 0.75, "new": 0.25}, "legal")
    assert sum(shown["requests"].values()) == 5
    assert client.get("/v1/routes").json() == {"data": [shown]}


def test_one_call_rolls_back(client):
    route(client, targets={"new": 1.0}, rollback="legal")
    assert ask(client) == "new"

    assert client.delete("/v1/adapters/legal/route").status_code == 200
    assert {ask(client) for _ in range(3)} == {"legal"}
    gone = client.get("/v1/adapters/legal/route")
    assert (gone.status_code, error_of(gone)["message"]) == (
        404,
        "No route is set for 'legal': its requests go to its current version.",
    )


CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 2}, "user"),
    ("/v1/chat/completions", CHAT, "user"),
    ("/v1/chat/completions", CHAT, "prompt_cache_key"),
    ("/v1/chat/completions", CHAT, "safety_identifier"),
    ("/v1/chat/completions", CHAT, "cache_salt"),
    ("/v1/messages", CHAT, "metadata.user_id"),
    ("/v1/responses", {"input": "abc", "max_output_tokens": 2}, "user"),
    ("/v1/responses", {"input": "abc", "max_output_tokens": 2}, "prompt_cache_key"),
    ("/v1/embeddings", {"input": "abc"}, "user"),
    ("/api/chat", {"messages": CHAT["messages"], "options": {"num_predict": 2}, "stream": False}, ""),
    ("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 2}}, "conversation_id"),
]


def seated(client: httpx.Client, device: FakeDevice, path: str, body: dict[str, Any]) -> AdapterId:
    """Who answers a call, as the device saw it."""
    device.plans.clear()
    name = "lora_path" if path == "/generate" else "model"
    client.post(path, json={name: "legal", **body}).raise_for_status()
    (seat,) = [seat for plan in device.plans for seat in plan.seats]
    return seat.adapter_id


@pytest.mark.parametrize(("path", "body", "asker"), CALLS)
def test_every_api_follows_the_route_and_keeps_an_asker_with_one_target(client, device, path, body, asker):
    route(client, **HALF)
    assert {seated(client, device, path, body) for _ in range(2)} == {LEGAL, NEW}
    if not asker:
        return
    field, _, inner = asker.partition(".")
    by_asker = {}
    for number in range(8):
        said = {field: {inner: f"user {number}"} if inner else f"user {number}"}
        (by_asker[number],) = {seated(client, device, path, body | said) for _ in range(2)}
    assert set(by_asker.values()) == {LEGAL, NEW}


@pytest.mark.parametrize(
    ("name", "body", "status", "param", "words"),
    [
        ("legal", {"targets": {"legal": 0.9, "new": 0.2}}, 400, "targets", "must sum to 1, not 1.1."),
        ("legal", {"targets": {}}, 400, "targets", "must name 1 to 16 targets, not 0."),
        ("legal", {"targets": {"legal": -1, "new": 2}}, 400, "targets.legal", "between 0 and 1, not -1.0."),
        ("legal", {"targets": {"legal": "1"}}, 400, "targets.legal", "should be a valid number"),
        ("legal", {"targets": {"owl": 1.0}}, 404, "targets.owl", "no model or adapter named 'owl'"),
        ("legal", {"targets": {"legal@9": 1.0}}, 404, "targets.legal@9", "no model or adapter named 'legal@9'"),
        ("legal", {**HALF, "rollback": "owl"}, 404, "rollback", "no model or adapter named 'owl'"),
        ("legal", {**HALF, "shadow": "owl"}, 404, "shadow", "no model or adapter named 'owl'"),
        ("legal", {**HALF, "shadow": "new"}, 400, "shadow", "'new' is one of the targets"),
        ("legal", {**HALF, "sticky": True}, 400, "sticky", "'sticky' is not a field"),
        ("owl", HALF, 404, "name", "No adapter named 'owl' is loaded; a route is set for a name that is."),
        ("letters", HALF, 404, "name", "No adapter named 'letters' is loaded"),
    ],
)
def test_a_route_that_cannot_be_is_refused_with_a_sentence_and_changes_nothing(
    client, name, body, status, param, words
):
    refused = route(client, name, **body)

    assert (refused.status_code, error_of(refused)["param"]) == (status, param)
    assert words in error_of(refused)["message"]
    assert client.get("/v1/routes").json() == {"data": []}


def test_a_refusal_repeats_no_more_of_a_name_than_it_needs(client):
    long = "x" * 10_000
    for body in ({"targets": {long: 1.0}}, {"targets": {long: 2.0}}, {"targets": {long: 1.0}, "shadow": long}):
        assert len(route(client, **body).content) < 2_000


def test_a_name_that_is_unloaded_takes_its_route_along(client):
    route(client, **HALF)
    client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"}).raise_for_status()

    refused = client.post("/v1/completions", json={"model": "legal", "prompt": "abc"})
    assert refused.status_code == 404
    assert until(lambda: client.get("/v1/routes").json() == {"data": []})
    client.post("/v1/load_lora_adapter", json={"lora_name": "legal", "lora_path": "/a/legal"}).raise_for_status()
    assert {ask(client) for _ in range(4)} == {"legal"}


def test_a_target_that_is_unloaded_is_told_as_the_reason(client):
    route(client, **HALF)
    client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).raise_for_status()

    assert {ask(client) for _ in range(4)} == {"legal"}
    shown = client.get("/v1/adapters/legal/route").json()
    assert shown["targets"] == {"legal": 1.0}
    assert shown["rolled_back"]["reason"] == "'new' was unloaded."


class Ruined(FakeDevice):
    """One of its adapters computes what is not a number."""

    def _sample(self, row: Row, end: int) -> int:
        token = super()._sample(row, end)
        return NO_TOKEN if self._rows[row].adapter_id == NEW else token


def ruined() -> FakeDevice:
    whole = letters_device()
    return Ruined(next_token=whole.next_token, capacity=whole.capacity)


def test_a_target_that_computes_no_number_answers_once_and_no_more(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "rota.traffic"), serving(tmp_path, ruined(), adapters=NAMES) as client:
        route(client, **HALF)
        body = {"model": "legal", "prompt": "abc", "max_tokens": 2}
        statuses = [client.post("/v1/completions", json=body).status_code for _ in range(6)]
        shown = client.get("/v1/adapters/legal/route").json()
        read = Scrape(client.get("/metrics").text)

    assert sorted(statuses) == [200] * 5 + [500]
    assert shown["rolled_back"]["reason"] == "'new' computed a value that is not a number."
    assert read("rota_rollbacks_total", cause="not_a_number") == 1
    assert read("rota_target_requests_total", adapter="legal", target="new", outcome="not_a_number") == 1
    assert read("rota_target_requests_total", adapter="legal", target="legal", outcome="length") == 5
    assert read("rota_target_ttft_seconds_count", adapter="legal", target="legal") == 5
    assert read("rota_target_weight", adapter="legal", target="legal") == 1
    assert read("rota_target_weight", adapter="legal", target="new") is None
    assert [record.message for record in caplog.records] == ["A route was rolled back."]


def copied(client: httpx.Client) -> Scrape:
    return Scrape(client.get("/metrics").text)


def test_a_shadow_gets_a_copy_and_its_answer_is_dropped(client, device):
    route(client, targets={"legal": 1.0}, shadow="shadow")
    assert ask(client) == "legal"

    assert until(lambda: copied(client)("rota_shadow_requests_total", outcome="length") == 1)
    seats = {seat.adapter_id: seat for plan in device.plans for seat in plan.seats}
    assert set(seats) == {LEGAL, SHADOW}
    assert seats[LEGAL].tokens == seats[SHADOW].tokens
    assert ask(client, "new") == "new"
    assert copied(client)("rota_shadow_requests_total", outcome="length") == 1, "only routed requests are copied"


def test_a_shadow_that_fails_is_told_and_answers_go_on(tmp_path):
    with serving(tmp_path, ruined(), adapters=NAMES) as client:
        route(client, targets={"legal": 1.0}, shadow="new")
        assert ask(client) == "legal"
        assert until(lambda: client.get("/v1/adapters/legal/route").json()["shadow"] is None)
        shown = client.get("/v1/adapters/legal/route").json()
        assert shown["shadow_ended"] == "'new' computed a value that is not a number."
        assert ask(client) == "legal"


def headers(key: Key) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.name}"}


def test_only_who_may_load_a_name_sets_its_route_and_who_may_use_it_is_routed(tmp_path, caplog):
    caplog.set_level(logging.INFO, "rota.audit")
    path = "/v1/adapters/legal/route"
    with serving(tmp_path, letters_device(), adapters=NAMES, keys=RING) as client:
        for call in (client.get, client.delete):
            assert call(path, headers=headers(ACME)).status_code == 403
        assert client.put(path, json=HALF, headers=headers(ACME)).status_code == 403
        assert client.put(path, json=HALF, headers=headers(OPERATOR)).status_code == 200
        body = {"model": "legal", "prompt": "abc", "max_tokens": 2}
        answers = [client.post("/v1/completions", json=body, headers=headers(ACME)).json() for _ in range(2)]
        assert {answer["model"] for answer in answers} == {"legal", "new"}
        assert client.get("/v1/routes", headers=headers(ACME)).json() == {"data": []}
        assert client.delete(path, headers=headers(OPERATOR)).status_code == 200

    told = [record.fields for record in caplog.records if record.name == "rota.audit"]
    assert [(one["action"], one["key"], one["outcome"] == "ok") for one in told] == [
        ("end_route", "acme", False),
        ("route", "acme", False),
        ("route", "operator", True),
        ("end_route", "operator", True),
    ]
    assert told[2]["targets"] == "legal 0.5, new 0.5"


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def renew(client: httpx.Client, **fields: Any) -> int:
    body = {"path": "/adapters/next", **fields}
    return client.put("/v1/adapters/legal", json=body).raise_for_status().json()["version"]


def version(client: httpx.Client, model: str = "legal", **fields: Any) -> str:
    """The version that answers."""
    body = {"model": model, "prompt": "abc", "max_tokens": 2, **fields}
    return client.post("/v1/completions", json=body).raise_for_status().headers["x-rota-adapter-version"]


def there(client: httpx.Client) -> list[int]:
    return sorted(one["version"] for one in client.get("/v1/adapters/legal").json()["versions"])


def test_a_new_version_is_tried_with_a_part_of_the_traffic(client):
    assert renew(client, mode="stage") == 2
    route(client, targets={"legal@1": 0.75, "legal@2": 0.25})

    assert sorted(version(client) for _ in range(4)) == ["1", "1", "1", "2"]
    assert {version(client, user="ann") for _ in range(4)} in ({"1"}, {"2"})
    assert version(client, "legal@2") == "2"


def test_an_update_does_not_take_away_what_a_route_needs(client):
    route(client, targets={"legal@1": 1.0})
    assert renew(client) == 2
    assert (version(client), there(client)) == ("1", [1, 2])

    route(client, targets={"legal@2": 1.0})
    assert version(client) == "2"
    assert until(lambda: there(client) == [2]), "nobody needs the first version any more"


def test_one_call_brings_the_old_version_back_and_lets_the_new_one_leave(client):
    route(client, targets={"legal@1": 1.0})
    renew(client)
    route(client, targets={"legal@2": 1.0}, rollback="legal@1")
    assert version(client) == "2"

    assert client.delete("/v1/adapters/legal/route").status_code == 200
    assert version(client) == "1"
    assert until(lambda: there(client) == [1])


def test_a_version_that_was_deleted_is_no_target(client):
    renew(client, mode="stage")
    route(client, targets={"legal@1": 0.5, "legal@2": 0.5})
    client.delete("/v1/adapters/legal@2").raise_for_status()

    assert {version(client) for _ in range(4)} == {"1"}
    refused = route(client, targets={"legal@2": 1.0})
    assert (refused.status_code, error_of(refused)["param"]) == (404, "targets.legal@2")
    assert client.get("/v1/adapters/legal/route").json()["rolled_back"]["reason"] == "'legal@2' was unloaded."


def test_a_route_is_rolled_back_at_once_though_an_update_of_the_name_is_under_way(tmp_path):
    device = SlowDevice()
    with serving(tmp_path, device, adapters=("legal",)) as client, ThreadPoolExecutor(2) as threads:
        route(client, targets={"legal@1": 1.0})
        renew(client)
        route(client, targets={"legal@2": 1.0}, rollback="legal@1")
        updating = threads.submit(renew, client, path="/a/slow")
        assert until(lambda: len(device.unread) == REPLICAS)
        assert version(client) == "2"

        ending = threads.submit(client.delete, "/v1/adapters/legal/route")
        assert until(lambda: version(client) == "1"), "the roll-back waits for the update"
        device.read()
        assert (updating.result(), ending.result().json()["targets"]) == (3, {"legal@2": 1.0})
        assert version(client) == "1"
        assert client.get("/v1/adapters/legal/route").status_code == 404


def test_a_name_that_is_unloaded_while_its_route_is_being_ended_says_so(tmp_path):
    device = SlowDevice()
    with serving(tmp_path, device, adapters=("legal",)) as client, ThreadPoolExecutor(3) as threads:
        route(client, targets={"legal@1": 1.0})
        renew(client)
        updating = threads.submit(client.put, "/v1/adapters/legal", json={"path": "/a/slow"})
        assert until(lambda: len(device.unread) == REPLICAS)
        ending = threads.submit(client.delete, "/v1/adapters/legal/route")
        unloading = threads.submit(client.delete, "/v1/adapters/legal")
        assert until(lambda: client.get("/v1/adapters/legal").status_code == 404)
        device.read()
        assert [one.result().status_code for one in (updating, unloading)] == [400, 200]
        refused = ending.result()
        assert refused.status_code == 404 or "was unloaded; load it again" in error_of(refused)["message"]
        assert client.get("/v1/routes").json() == {"data": []}


# ── routes of the start ───────────────────────────────────────────────────────────────────────────────────────────────

FIRST = {"targets": {"legal": 0.5, "new@1": 0.5}, "rollback": "legal", "shadow": "poet"}


def test_routes_of_the_start_send_requests_from_the_first_one_on(tmp_path):
    config = ServerConfig(lora_routes=(f"legal={json.dumps(FIRST)}",))
    with serving(tmp_path, letters_device(), config, adapters=("legal", "new", "poet")) as client:
        shown = client.get("/v1/adapters/legal/route").json()
        body = {"model": "legal", "prompt": "abc", "max_tokens": 2}
        answered = {client.post("/v1/completions", json=body).json()["model"] for _ in range(2)}
        client.delete("/v1/adapters/new").raise_for_status()
        after = client.get("/v1/adapters/legal/route").json()

    assert {key: shown[key] for key in FIRST} == FIRST
    assert answered == {"legal", "new"}
    assert after["rolled_back"]["reason"] == "'new@1' was unloaded."


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["legal"], "'legal' is no route; give NAME=JSON, with the JSON of PUT"),
        (['owl={"targets": {"legal": 1}}'], "'owl' is none of the adapters to start with; they are: legal, new."),
        (['legal={"targets": {"owl": 1}}'], "'owl' is none of the adapters to start with"),
        (['legal={"targets": {"legal@2": 1}}'], "'legal@2' is none of the adapters to start with"),
        (['legal={"targets": {"legal": 0.5}}'], "the route of 'legal' cannot be: The weights in targets must sum to 1"),
        (['legal={"weights": {}}'], "the route of 'legal' cannot be: "),
        (["legal={"], "the route of 'legal' cannot be: "),
        (['legal={"targets": {"new": 1}}'] * 2, "two routes for 'legal'; a name has one"),
    ],
)
def test_a_route_that_cannot_be_is_refused_at_the_start(entries, words):
    registry = Registry("letters", "/models/letters")
    for name in ("legal", "new"):
        registry.add(LoraPath(name=name, path=f"/adapters/{name}"))
    with pytest.raises(ConfigError) as refusal:
        first_routes(entries, registry)
    assert words in str(refusal.value)
