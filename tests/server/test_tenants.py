"""Keys are tenants: their requests carry their share, none finds another's KV, and a gateway may speak for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core.errors import ConfigError
from rota.core.request import Request
from rota.core.tenant import SOLE_TENANT, Tenant
from rota.runtime.registry import Registry
from rota.server.access.access import Access
from rota.server.access.key_file import read_keys
from rota.server.access.keys import ANYONE, Key, KeyRing, digest_of, group_scope, groups_of, salted_scope
from rota.text.tokenizer import Tokenizer
from tests.observe.scraped import Scrape
from tests.server.applications import made_app, running
from tests.server.engines import Heedful, engines
from tests.server.letters import error_of, letters_device, serving
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

TEXT = "the quick brown fox jumps over the lazy dog, twice and again"
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 2}},
}


def requests_sent(folder: Path, keys: KeyRing | None, **headers: str) -> list[Request]:
    """What reaches the engine of one call to each route, and of a probe."""
    registry = Registry("letters", "/models/letters")
    service = Heedful(engines(letters_device))
    app = made_app(service, Tokenizer(write_byte_tokenizer(folder)), registry, access=Access(registry, keys))
    with running(app) as url, httpx.Client(base_url=url, headers=headers) as client:
        service.wait_until_ready(TIMEOUT_S)  # requests wait for a start, and a probe does not
        answers = [client.post(route, json=body) for route, body in CALLS.items()]
        assert [answer.status_code for answer in [*answers, client.get("/health_generate")]] == [200] * 4
    return [message for message in service.sent if isinstance(message, Request)]


def test_a_request_carries_the_share_and_the_limits_of_its_key(tmp_path):
    acme = Key("acme", weight=2.5, max_running=3, max_queued=9)
    sent = requests_sent(tmp_path, KeyRing({digest_of("secret"): acme}), **{"x-api-key": "secret"})

    assert {request.tenant for request in sent} == {Tenant(name="acme", weight=2.5, max_running=3, max_queued=9)}
    assert {request.cache_scope for request in sent} == {acme.cache_scope}


def test_a_key_of_the_command_line_is_a_tenant_too(tmp_path):
    sent = requests_sent(tmp_path, read_keys(["first", "second"], None), **{"x-api-key": "second"})

    assert {request.tenant for request in sent} == {Tenant(name="key 2")}


def test_without_keys_there_is_one_tenant_and_one_scope(tmp_path):
    sent = requests_sent(tmp_path, None)

    assert {(request.tenant, request.cache_scope) for request in sent} == {(SOLE_TENANT, "")}


def test_a_key_that_is_called_anyone_is_not_the_key_of_a_server_without_keys():
    assert Key("anyone") != ANYONE
    assert Key("anyone").cache_scope != ANYONE.cache_scope


def key_file(folder: Path, **shares: str) -> str:
    """Keys whose secrets are their names."""
    path = folder / "keys.toml"
    tables = [
        f'[keys.{name}]\nkey = "{name}"\nmay_use_base = true\nadapters = "all"\nshares_prefixes_with = {shared}\n'
        for name, shared in shares.items()
    ]
    path.write_text("\n".join(tables))
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("letters")
    keys = read_keys([], key_file(folder, acme="[]", birds="[]", cats='["dogs"]', dogs="[]"))
    with serving(folder, letters_device(), keys=keys, adapters=("pirate",)) as client:
        yield client


def cached(client: httpx.Client, key: str, route: str, **fields: Any) -> int:
    """Prompt tokens that a call found in the cache."""
    answer = client.post(route, json=CALLS[route] | fields, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    found = body["meta_info"] if route == "/generate" else body["usage"]["prompt_tokens_details"]
    tokens: int = found["cached_tokens"]
    return tokens


@pytest.mark.parametrize("route", CALLS)
@pytest.mark.parametrize("adapter", [{}, {"lora_path": "pirate"}], ids=["base", "adapter"])
def test_a_right_guess_of_another_tenants_prompt_shows_nothing(client, route, adapter):
    # The salt is only for this test: the tests of this file share a server.
    fields = adapter | {"cache_salt": f"guess {route} {adapter}"}
    assert cached(client, "acme", route, **fields) == 0

    assert cached(client, "birds", route, **fields) == 0
    assert cached(client, "acme", route, **fields) > 0


def test_without_a_salt_too_a_tenant_finds_only_its_own_prompts(client):
    keys = ("acme", "birds", "acme")
    found = [cached(client, key, "/v1/completions", prompt=TEXT[::-1]) > 0 for key in keys]

    assert found == [False, False, True]


def test_keys_that_share_prefixes_find_each_others_prompts_in_both_directions(client):
    assert cached(client, "cats", "/v1/completions", cache_salt="one") == 0
    assert cached(client, "dogs", "/v1/completions", cache_salt="one") > 0
    assert cached(client, "dogs", "/v1/completions", cache_salt="two") == 0
    assert cached(client, "cats", "/v1/completions", cache_salt="two") > 0
    assert cached(client, "acme", "/v1/completions", cache_salt="two") == 0


@pytest.mark.parametrize("route", CALLS)
def test_a_salt_is_a_wall_within_one_key(client, route):
    def found(salt: str | None) -> bool:
        return cached(client, "birds", route, cache_salt=salt) > 0

    salt = f"wall {route}"
    found(None)
    assert [found(salt), found(salt), found(f"{salt} two"), found(None)] == [False, True, False, True]


@pytest.mark.parametrize("route", CALLS)
def test_a_salt_counts_without_keys_too(tmp_path, route):
    with serving(tmp_path, letters_device()) as client:
        found = [cached(client, "", route, cache_salt=salt) > 0 for salt in (None, "one", "one", "two", None)]

    assert found == [False, False, True, False, True]


@pytest.mark.parametrize("route", CALLS)
@pytest.mark.parametrize("salt", ["", 7, ["a"]])
def test_a_salt_that_is_no_text_or_empty_is_refused(client, route, salt):
    refused = client.post(route, json=CALLS[route] | {"cache_salt": salt}, headers={"x-api-key": "acme"})

    assert (refused.status_code, error_of(refused)["param"]) == (400, "cache_salt")


# ── scopes ────────────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = st.text(max_size=6)
# A group of names, and a salt or none.
SCOPES = st.tuples(st.frozensets(NAMES, min_size=1, max_size=3), st.none() | st.text(min_size=1, max_size=6))


def scope(names: frozenset[str], salt: str | None) -> str:
    return group_scope(names) if salt is None else salted_scope(group_scope(names), salt)


@given(SCOPES, SCOPES)
def test_two_scopes_are_the_same_only_if_their_names_and_salts_are(one, other):
    assert (scope(*one) == scope(*other)) == (one == other)


@given(st.text(min_size=1), SCOPES)
def test_no_salt_leads_from_a_server_without_keys_into_a_keys_scope(salt, other):
    assert salted_scope("", salt) not in ("", scope(*other))


def test_sharing_is_mutual_and_reaches_the_keys_of_keys():
    groups = groups_of({"a": ["b"], "b": [], "c": ["b"], "d": [], "e": ["d", "e"]})

    assert groups == {name: frozenset("abc") for name in "abc"} | {name: frozenset("de") for name in "de"}


def test_a_key_that_shares_with_all_joins_all():
    assert set(groups_of({"a": [], "b": None, "c": []}).values()) == {frozenset("abc")}


def test_a_name_that_no_key_has_is_said_in_a_sentence():
    with pytest.raises(ConfigError, match="'a': shares_prefixes_with names 'owl', and no key has that name"):
        groups_of({"a": ["owl"]})


# ── gateways ──────────────────────────────────────────────────────────────────────────────────────────────────────────

KEYS = KeyRing(
    {
        digest_of("boss"): Key("boss"),
        digest_of("gateway"): Key("gateway", may_operate=False),
        digest_of("guest"): Key("guest", may_operate=False, may_set_headers=False),
    }
)
FAIRNESS_ID, TTFT_MS = "x-llm-d-inference-fairness-id", "x-llm-d-slo-ttft-ms"


def complete(client: httpx.Client, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    bodies = {
        "/v1/completions": {"prompt": "abc", "max_tokens": 3},
        "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 3}},
    }
    return client.post(path, json=bodies[path], headers=headers)


def counted(client: httpx.Client, **headers: str) -> dict[str, float]:
    samples = Scrape(client.get("/metrics", headers=headers).raise_for_status().text).samples
    return {one.labels["key"]: one.value for one in samples if one.name == "rota_key_output_tokens_total"}


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_gateway_names_tenants_and_keys_without_the_right_do_not(tmp_path, path):
    with serving(tmp_path, keys=KEYS) as client:
        for key, tenant in (("gateway", "acme"), ("gateway", "birds"), ("guest", "acme")):
            complete(client, path, **{"x-api-key": key, FAIRNESS_ID: tenant, TTFT_MS: "250"}).raise_for_status()
        complete(client, path, **{"x-api-key": "gateway"}).raise_for_status()

        assert counted(client, **{"x-api-key": "boss"}) == {
            "gateway/acme": 3,
            "gateway/birds": 3,
            "gateway": 3,
            "guest": 3,
        }


def test_without_keys_every_client_may_name_a_tenant(tmp_path):
    with serving(tmp_path) as client:
        complete(client, **{FAIRNESS_ID: "acme"}).raise_for_status()

        assert counted(client) == {"acme": 3}


@pytest.mark.parametrize(
    ("header", "value"),
    [(FAIRNESS_ID, "a b"), (FAIRNESS_ID, "x" * 129), (TTFT_MS, "soon"), (TTFT_MS, "-1"), (TTFT_MS, "inf")],
)
def test_a_header_that_cannot_be_meant_is_refused_by_its_name(tmp_path, header, value):
    with serving(tmp_path) as client:
        answer = complete(client, **{header: value})

    assert answer.status_code == 400
    assert error_of(answer)["param"] == header


def test_only_the_tenant_of_a_key_is_another_for_requests_of_a_named_one():
    key = KEYS.named("gateway")
    assert key is not None
    acme = key.on_behalf_of("acme")

    assert (acme, acme.name, acme.cache_scope) == (key, "gateway", key.cache_scope)
    assert (acme.tenant.name, key.tenant.name) == ("gateway/acme", "gateway")
