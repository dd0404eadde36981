from __future__ import annotations

import httpx
import pytest

from rota.server.access.keys import Key, KeyRing, digest_of
from tests.observe.scraped import Scrape
from tests.server.letters import error_of, serving

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
