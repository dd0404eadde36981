"""/v1/embeddings, /v1/score and /v1/rerank: texts as vectors, and how near they are."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from rota.core.ids import BASE
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.server.letters import CONTEXT, counts, error_of, has_ended, raw_ask, serving
from tests.waiting import TIMEOUT_S, until

KEYS = KeyRing(
    {
        digest_of("sk-all"): Key("all"),
        digest_of("sk-pirate"): Key("pirate", frozenset({"pirate"}), may_use_base=False),
        digest_of("sk-few"): Key("few", tokens_per_minute=5),
    }
)


@pytest.fixture(scope="module")
def client(device, tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device, keys=KEYS, adapters=("pirate",)) as client:
        client.headers["x-api-key"] = "sk-all"
        yield client


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/embeddings", json=fields)


def vectors(response: httpx.Response) -> list[list[float]]:
    return [entry["embedding"] for entry in response.json()["data"]]


def unit(text: str) -> list[float]:
    """What the fake model makes of a text: its last letter and a one, with length one."""
    return [value / math.hypot(text.encode()[-1], 1) for value in (text.encode()[-1], 1)]


def test_a_text_becomes_the_models_last_hidden_state_with_length_one(client):
    body = ask(client, input="abc").json()

    assert body["object"] == "list"
    assert body["model"] == "letters"
    assert body["data"][0]["embedding"] == pytest.approx(unit("abc"), abs=1e-6)
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_lists_and_token_ids_give_a_vector_each_in_their_order(client):
    texts = vectors(ask(client, input=["ab", "c"]))
    tokens = vectors(ask(client, input=[[97, 98], [99]]))

    assert texts == tokens
    assert texts[1] == pytest.approx(unit("c"), abs=1e-6)
    assert vectors(ask(client, input=[97, 98])) == texts[:1]


def test_the_mean_of_all_hidden_states_is_another_pooling(client):
    assert vectors(ask(client, input="abc", pooling="mean"))[0] == pytest.approx(unit("b"), abs=1e-6)


def test_an_adapter_reads_the_text_if_it_is_named(client, device):
    body = ask(client, input="abc", model="pirate").json()
    seat = [seat for plan in device.plans for seat in plan.seats][-1]

    assert body["model"] == "pirate"
    assert seat.adapter_id != BASE


def test_base64_holds_the_same_numbers(client):
    packed = base64.b64decode(vectors(ask(client, input="abc", encoding_format="base64"))[0])

    assert struct.unpack(f"<{len(packed) // 4}f", packed) == pytest.approx(unit("abc"), abs=1e-6)


def test_the_openai_package_reads_them(client):
    with OpenAI(base_url=f"{client.base_url}/v1", api_key="sk-all", max_retries=0, timeout=TIMEOUT_S) as openai:
        answer = openai.embeddings.create(model="letters", input=["ab", "c"])

    assert [entry.embedding for entry in answer.data][1] == pytest.approx(unit("c"), abs=1e-6)


def test_scores_are_cosines_of_one_with_each_or_of_pairs(client):
    def scores(first: Any, second: Any, path: str = "/v1/score") -> list[float]:
        body = client.post(path, json={"text_1": first, "text_2": second}).json()
        return [entry["score"] for entry in body["data"]]

    one_with_each = scores("abc", ["abc", "xyz"])

    assert one_with_each[0] == pytest.approx(1.0)
    expected = sum(a * b for a, b in zip(unit("abc"), unit("xyz"), strict=True))
    assert one_with_each[1] == pytest.approx(expected, abs=1e-9)
    assert scores(["abc", "xyz"], ["abc", "xyz"]) == pytest.approx([1.0, 1.0])
    assert scores("abc", "abc", "/score") == pytest.approx([1.0])


def test_documents_are_put_in_order(client):
    fields = {"query": "abc", "documents": ["xyz", "abc", "ab"], "top_n": 2}
    results = client.post("/v1/rerank", json=fields).json()["results"]

    assert (results[0]["index"], results[0]["document"]["text"]) == (1, "abc")
    assert results[0]["relevance_score"] == pytest.approx(1.0)
    assert len(results) == 2


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/v1/embeddings", {"input": ""}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": [["a"]]}, 400, "input.0.0"),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "model": "none"}, 404, "model"),
        ("/v1/embeddings", {"input": ["a", "x" * CONTEXT]}, 400, "input.1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, 400, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(client, path, fields, status, param):
    response = client.post(path, json=fields)

    assert (response.status_code, error_of(response)["param"]) == (status, param)


def test_keys_and_limits_hold_as_for_a_chat(client):
    foreign = client.post("/v1/embeddings", json={"input": "a"}, headers={"x-api-key": "sk-pirate"})
    few = [client.post("/v1/embeddings", json={"input": "abcd"}, headers={"x-api-key": "sk-few"}) for _ in range(2)]

    assert foreign.status_code == 403
    assert [answer.status_code for answer in few] == [200, 429]


def test_a_client_that_leaves_ends_its_requests(tmp_path):
    with serving(tmp_path) as client:
        client.post("/pause", params={"mode": "keep"}).raise_for_status()
        with raw_ask(client, "/v1/embeddings", input=["abc"] * 64):
            assert until(lambda: counts(client)["waiting"] == 64)

        assert has_ended(client)
