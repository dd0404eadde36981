"""Keys over HTTP: who gets in, what a tenant sees and may use, and what it may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.core.request import Request
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.exposure import check_exposure, describe, is_local_name, is_loopback, load_refusal
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.text.tokenizer import Tokenizer
from tests.server.applications import made_app, running
from tests.server.engines import Heedful, engines
from tests.server.letters import error_of, letters_device, serving
from tests.tiny_tokenizer import write_byte_tokenizer

OPERATOR = Key("operator")
ACME = Key(
    "acme",
    frozenset({"pirate", "acme-*"}),
    may_use_base=False,
    may_operate=False,
    weight=3.0,
    priority=7,
    adapter_root="/a",
)
BIRDS = Key("birds", frozenset({"parrot"}), may_load=False, may_operate=False)
SLOW = Key("slow", may_operate=False, requests_per_minute=2)
SPARING = Key("sparing", may_operate=False, tokens_per_minute=40)

RING = KeyRing({digest_of(key.name): key for key in (OPERATOR, ACME, BIRDS, SLOW, SPARING)})
ADAPTERS = ("pirate", "parrot", "acme-poet")
PROMPT = {"prompt": "abc", "max_tokens": 3}


@pytest.fixture(scope="module")
def client(tmp_path_factory, device) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("letters"), device, keys=RING, adapters=ADAPTERS) as client:
        yield client


def bearer(key: Key) -> dict[str, str]:
    """A test's keys have their names for secrets."""
    return {"Authorization": f"Bearer {key.name}"}


def ask(client: httpx.Client, key: Key, model: str | None = "pirate", **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={**PROMPT, "model": model, **fields}, headers=bearer(key))


def load(client: httpx.Client, key: Key, name: str, route: str = "/v1/load_lora_adapter") -> httpx.Response:
    return client.post(route, json={"lora_name": name, "lora_path": f"/a/{name}"}, headers=bearer(key))


def unload(client: httpx.Client, key: Key, name: str, route: str = "/v1/unload_lora_adapter") -> httpx.Response:
    return client.post(route, json={"lora_name": name}, headers=bearer(key))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer nobody"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic operator"},
        {"Authorization": "operator"},
        {"x-api-key": "nobody"},
        {"x-api-key": "Operator"},
        {"Authorization": "Bearer operator", "x-api-key": "nobody"},
    ],
)
def test_without_a_right_key_nobody_gets_in(client, headers):
    for refused in (client.get("/v1/models", headers=headers), client.post("/generate", headers=headers, json={})):
        assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        assert refused.headers["WWW-Authenticate"] == "Bearer"


def test_every_route_but_the_open_ones_is_closed_also_those_that_come_later(client):
    described = client.get("/openapi.json").json()["paths"]
    answers = {
        (path, method): client.request(method, path.replace("{", "").replace("}", "")).status_code
        for path, methods in described.items()
        for method in methods
    }

    assert len(answers) > 40
    open_ones = {path for (path, _), status in answers.items() if status != 401}
    assert open_ones <= {"/health", "/livez", "/readyz", "/dashboard"}


OPEN = ("/health", "/livez", "/readyz", "/docs", "/openapi.json")


def test_probes_and_documentation_need_no_key(client):
    assert [client.get(path).status_code for path in OPEN] == [200] * len(OPEN)


@pytest.mark.parametrize("headers", [{"Authorization": "bearer operator"}, {"x-api-key": "operator"}])
def test_a_key_may_come_in_either_header(client, headers):
    assert client.get("/v1/models", headers=headers).status_code == 200


def test_a_tenant_sees_only_what_it_may_use(client):
    def names(key: Key) -> list[str]:
        return [model["id"] for model in client.get("/v1/models", headers=bearer(key)).json()["data"]]

    assert names(OPERATOR) == ["letters", "pirate", "parrot", "acme-poet"]
    assert names(ACME) == ["pirate", "acme-poet"]
    assert names(BIRDS) == ["letters", "parrot"]


@pytest.mark.parametrize(
    ("key", "model", "status"),
    [
        (ACME, "pirate", 200),
        (ACME, "letters:acme-poet", 200),
        (ACME, "parrot", 403),
        (ACME, "letters:parrot", 403),
        (ACME, "acme-owl", 404),
        (ACME, "nothing", 403),  # so that nobody learns what others have
        (ACME, None, 403),
        (ACME, "letters", 403),
        (BIRDS, None, 200),
        (BIRDS, "parrot", 200),
        (BIRDS, "pirate", 403),
        (OPERATOR, "nothing", 404),
    ],
)
def test_a_tenant_uses_only_what_is_its_own(client, key, model, status):
    native = {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "lora_path": model}
    answers = [ask(client, key, model), client.post("/generate", json=native, headers=bearer(key))]

    assert [answer.status_code for answer in answers] == [status, status]
    if model is not None and model != "letters":
        assert client.get(f"/v1/models/{model}", headers=bearer(key)).status_code == status


@pytest.mark.parametrize(
    ("model", "status"), [("letters", 200), ("pirate", 200), ("acme-poet", 400), ("parrot", 403), ("owl", 403)]
)
def test_a_tenant_that_names_two_learns_nothing_of_what_is_not_its_own(client, model, status):
    assert ask(client, ACME, model, lora_path="pirate").status_code == status


def test_a_refusal_names_only_what_the_tenant_may_use(client):
    refused = error_of(ask(client, ACME, "parrot"))
    unknown = error_of(ask(client, ACME, "acme-owl"))

    assert refused["message"] == "Key 'acme' may not use 'parrot'; it may use: pirate, acme-poet."
    assert unknown["message"].endswith("named 'acme-owl'; known are: pirate, acme-poet.")


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [(BIRDS, "parrot", "that needs may_load"), (ACME, "parrot", "may not load or unload 'parrot'")],
)
@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_loading_and_unloading_takes_the_right_and_the_name(client, key, name, words, prefix):
    for refused in (
        load(client, key, name, f"{prefix}/load_lora_adapter"),
        unload(client, key, name, f"{prefix}/unload_lora_adapter"),
    ):
        assert (refused.status_code, words in error_of(refused)["message"]) == (403, True)
    assert ask(client, BIRDS, "parrot").status_code == 200


def test_a_tenant_loads_and_unloads_under_its_own_names_and_hears_of_no_others(client):
    loaded = load(client, ACME, "acme-owl", "/load_lora_adapter")
    unknown = unload(client, ACME, "acme-cat", "/unload_lora_adapter")
    listed = {name: name for name in ("pirate", "acme-poet", "acme-owl")}

    assert loaded.json() == {"success": True, "error_message": None, "loaded_adapters": listed}
    assert "loaded are: acme-owl, acme-poet, pirate." in unknown.json()["error_message"]
    assert unload(client, ACME, "acme-owl").status_code == 200


@pytest.mark.parametrize("route", ["/v1/load_lora_adapter", "/load_lora_adapter"])
def test_a_keys_weight_is_its_own_and_not_that_of_the_adapters_it_loads(client, device, route):
    load(client, ACME, "acme-heavy", route)
    fetched = [adapter for plan in device.plans for adapter in plan.fetches]

    assert next(adapter.weight for adapter in fetched if adapter.name == "acme-heavy") == 1.0
    unload(client, ACME, "acme-heavy")


def test_a_keys_priority_goes_to_its_requests(tmp_path):
    registry = Registry("letters", "/models/letters")
    service = Heedful(engines(letters_device))
    ring = KeyRing({digest_of("soon"): Key("soon", priority=7)})
    app = made_app(service, Tokenizer(write_byte_tokenizer(tmp_path)), registry, access=Access(registry, ring))
    with running(app) as url:
        for route, body in (("/v1/completions", PROMPT), ("/generate", {"text": "abc"})):
            assert httpx.post(url + route, json=body, headers={"x-api-key": "soon"}).status_code == 200

    assert [message.priority for message in service.sent if isinstance(message, Request)] == [7, 7]


def test_when_a_first_token_is_wanted_goes_with_the_requests_of_a_key_that_may_say_so(tmp_path):
    registry = Registry("letters", "/models/letters")
    service = Heedful(engines(letters_device))
    ring = KeyRing({digest_of("may"): Key("may"), digest_of("not"): Key("not", may_set_headers=False)})
    app = made_app(service, Tokenizer(write_byte_tokenizer(tmp_path)), registry, access=Access(registry, ring))
    with running(app) as url:
        for key in ("may", "not"):
            headers = {"x-api-key": key, "x-llm-d-slo-ttft-ms": "250"}
            for route, body in (("/v1/completions", PROMPT), ("/generate", {"text": "abc"})):
                assert httpx.post(url + route, json=body, headers=headers).status_code == 200

    wanted = [message.first_token_s for message in service.sent if isinstance(message, Request)]
    assert wanted == [0.25, 0.25, None, None]


@pytest.mark.parametrize("path", ["/flush_cache", "/server_info", "/get_server_info"])
def test_what_is_everybodys_takes_the_right_to_operate(client, path):
    method = "POST" if path == "/flush_cache" else "GET"
    refused = client.request(method, path, headers=bearer(ACME))

    assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
    assert client.request(method, path, headers=bearer(OPERATOR)).status_code == 200


def test_a_minute_that_is_used_up_is_429_with_the_time_it_takes(client):
    answers = [ask(client, SLOW, None) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].headers["Retry-After"] == "30"
    assert error_of(answers[2])["code"] == "rate_limit_exceeded"
    assert error_of(answers[2])["message"].startswith("Key 'slow' may have 2 requests a minute; come back in")


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"json": PROMPT | {"temperature": -1}}, 400),
        ({"content": b"{"}, 400),
        ({"json": PROMPT | {"model": "owl"}}, 404),
        ({"json": PROMPT | {"prompt": "x" * 300}}, 400),
    ],
)
def test_a_call_that_is_refused_for_what_it_says_counts_and_one_that_is_refused_by_the_limit_does_not(
    tmp_path, asked, status
):
    with serving(tmp_path, letters_device(), keys=RING) as client:
        client.headers.update(bearer(SLOW))
        answers = [client.post("/v1/completions", **asked) for _ in range(4)]

    assert [answer.status_code for answer in answers] == [status, status, 429, 429]
    assert int(answers[3].headers["Retry-After"]) <= 30, "the third has not made it longer"


def test_tokens_of_prompts_and_answers_are_counted(client):
    answers = [ask(client, SPARING, None, prompt="abcdef", max_tokens=20) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 429]
    # 26 or 27 tokens of 40 a minute are gone, and the second call needs as many: 13 are missing.
    assert 15 <= int(answers[1].headers["Retry-After"]) <= 21


def test_looking_around_is_not_limited(client):
    assert all(client.get("/v1/models", headers=bearer(SLOW)).status_code == 200 for _ in range(5))


def test_a_server_without_keys_asks_for_none(tmp_path):
    with serving(tmp_path) as client:
        headers = {"Authorization": "Bearer whatever"}
        assert client.post("/v1/completions", json=PROMPT).status_code == 200
        assert client.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
        assert client.post("/flush_cache").status_code == 200


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_a_page_of_another_site_cannot_use_a_server_through_its_visitors_browser(client, site, status):
    headers = {**bearer(OPERATOR), "Sec-Fetch-Site": site}
    answers = [client.get("/flush_cache", headers=headers), client.get("/v1/models", headers=headers)]

    assert [answer.status_code for answer in answers] == [status, status]
    assert client.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.1.2.3", False),
        ("", False),
        ("no such host", False),
    ],
)
def test_an_address_that_only_this_machine_reaches_is_known_as_such(host, is_local):
    assert is_loopback(host) is is_local


def test_an_open_door_is_refused_unless_it_is_asked_for():
    anyone = ServerConfig(host="0.0.0.0", allow_anyone=True)
    with pytest.raises(ConfigError, match=r"give --api-key or --api-key-file, listen on .* or say --allow-anyone"):
        check_exposure(ServerConfig(host="0.0.0.0"), KeyRing())
    for config, keys in [(ServerConfig(host="0.0.0.0"), RING), (anyone, KeyRing()), (ServerConfig(), KeyRing())]:
        check_exposure(config, keys)

    assert describe(anyone, KeyRing()) == "There are no keys: every client that can reach 0.0.0.0 may do everything."
    assert "other machines cannot reach it" in describe(ServerConfig(), KeyRing())
    assert describe(ServerConfig(), RING) == "Requests need a key."


@pytest.mark.parametrize(
    ("config", "keys", "root", "may"),
    [
        (ServerConfig(), KeyRing(), None, True),
        (ServerConfig(), RING, None, False),
        (ServerConfig(), RING, "/adapters", True),
        (ServerConfig(host="0.0.0.0", allow_anyone=True), KeyRing(), None, False),
        (ServerConfig(host="0.0.0.0", allow_anyone=True), KeyRing(), "/adapters", True),
    ],
)
def test_only_users_of_this_machine_load_from_anywhere(config, keys, root, may):
    assert (load_refusal(config, keys, root) == "") is may


def test_a_slot_for_good_is_an_operators_to_give(client):
    body = {"lora_name": "acme-owl", "lora_path": "/a/owl", "pinned": True}
    refused = client.post("/load_lora_adapter", json=body, headers=bearer(ACME))

    assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden")
    assert "may_operate" in error_of(refused)["message"]


LORA = {"lora_name": "parrot", "lora_path": "/a/parrot"}
WEIGHTS = {"lora_name": "parrot", "config_dict": {}, "serialized_tensors": ""}


@pytest.mark.parametrize(
    ("method", "path", "sent", "param"),
    [
        ("POST", "/v1/load_lora_adapter", {"json": LORA}, "lora_name"),
        ("POST", "/v1/load_lora_adapter", {"json": {**LORA, "load_inplace": True}}, "lora_name"),
        ("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": "parrot"}}, "lora_name"),
        ("POST", "/load_lora_adapter", {"json": LORA}, "lora_name"),
        ("POST", "/load_lora_adapter", {"json": {**LORA, "lora_name": "acme-owl", "pinned": True}}, "pinned"),
        ("POST", "/unload_lora_adapter", {"json": {"lora_name": "parrot"}}, "lora_name"),
        ("POST", "/load_lora_adapter_from_tensors", {"json": WEIGHTS}, "lora_name"),
        ("PUT", "/v1/adapters/parrot", {"json": {"path": "/a/parrot"}}, "name"),
        ("PUT", "/v1/adapters/parrot", {"json": {"version": 1}}, "name"),
        ("PUT", "/v1/adapters/acme-owl", {"json": {"path": "/a/owl", "pinned": True}}, "pinned"),
        ("PUT", "/v1/adapters/parrot", {"headers": {"content-type": "application/octet-stream"}}, "name"),
        ("DELETE", "/v1/adapters/parrot", {}, "name"),
        ("PUT", "/v1/adapters/parrot/route", {"json": {"targets": {"parrot": 1.0}}}, "name"),
        ("GET", "/v1/adapters/parrot/route", {}, "name"),
        ("DELETE", "/v1/adapters/parrot/route", {}, "name"),
    ],
)
def test_a_refusal_names_the_field_in_which_its_route_takes_the_name(client, method, path, sent, param):
    headers = {**bearer(ACME), **sent.get("headers", {})}
    refused = client.request(method, path, **{**sent, "headers": headers})

    assert (refused.status_code, error_of(refused)["param"]) == (403, param)


@pytest.mark.parametrize("path", ["/v1/adapters/owl", "/v1/load_lora_adapter", "/load_lora_adapter"])
def test_a_key_without_a_folder_is_told_which_field_names_one(client, path):
    is_put = path.startswith("/v1/adapters")
    body = {"path": "/a/owl"} if is_put else {"lora_name": "owl", "lora_path": "/a/owl"}
    refused = client.request("PUT" if is_put else "POST", path, json=body, headers=bearer(SLOW))

    assert (refused.status_code, error_of(refused)["param"]) == (403, "path" if is_put else "lora_path")


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True),
        ("LOCALHOST:30000", True),
        ("rota.localhost:30000", True),
        ("127.0.0.1:30000", True),
        ("[::1]:30000", True),
        ("192.168.0.7", True),
        ("workstation:30000", True),
        ("evil.example:30000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_names_of_this_machine_are_told_from_names_that_only_lead_here(host, is_local):
    assert is_local_name(host, own_name="workstation") is is_local


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/model_info"])
def test_without_keys_a_name_that_was_made_to_lead_here_is_refused(tmp_path, path):
    registry = Registry("letters", "/models/letters")
    service = engines(letters_device)
    access = Access(registry, own_name="127.0.0.1")
    app = made_app(service, Tokenizer(write_byte_tokenizer(tmp_path)), registry, access=access)
    with running(app) as url:
        here = httpx.get(url + path)
        elsewhere = httpx.get(url + path, headers={"Host": "evil.example"})

    assert (here.status_code, elsewhere.status_code) == (200, 403)
    assert "'evil.example'" in error_of(elsewhere)["message"]
