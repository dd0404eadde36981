"""A pause over HTTP: clients wait, nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import REPLICAS
from tests.server.letters import counts, error_of, has_ended, letters_device, serving
from tests.waiting import TIMEOUT_S, until

RING = KeyRing({digest_of("sk-boss"): Key("boss"), digest_of("sk-user"): Key("user", may_operate=False)})
MAY_END = threading.Event()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Ask = Callable[..., Future[httpx.Response]]


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Iterator[httpx.Client]:
    """A client of a server whose answers go on until they may end."""
    with serving(tmp_path_factory.mktemp("model"), endless_device(MAY_END.is_set), adapters=("pirate",)) as client:
        yield client


@pytest.fixture
def client(endless) -> Iterator[httpx.Client]:
    MAY_END.clear()
    yield endless
    MAY_END.set()
    endless.post("/resume")  # or the threads of a failed test would wait
    assert has_ended(endless)


@pytest.fixture
def ask(client) -> Iterator[Ask]:
    with ThreadPoolExecutor(4) as threads:

        def ask(tokens: int = ENDLESS, **fields: Any) -> Future[httpx.Response]:
            body = {"prompt": "ab", "max_tokens": tokens, **fields}
            return threads.submit(client.post, "/v1/completions", json=body)

        yield ask
        MAY_END.set()
        client.post("/resume")


def paused_engines(client: httpx.Client) -> list[float]:
    """As the metrics tell of each engine."""
    lines = client.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("rota_paused{")]


def has_begun(client: httpx.Client, name: str = "mine") -> bool:
    """Whether an answer has letters."""
    return until(lambda: client.get(f"/v1/requests/{name}").json().get("output_tokens", 0) > 0)


def text_of(asked: Future[httpx.Response]) -> str:
    response = asked.result()
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_open_answers_stand_still_and_go_on_after_the_resume(client, ask):
    asked = ask(rid="mine")
    assert has_begun(client)

    paused = client.post("/pause", params={"mode": "keep"})
    new = ask(2)
    assert until(lambda: sum(counts(client).values()) == 2)
    assert (paused.status_code, paused.json()) == (200, {"status": "paused"})
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert not any(one.done() for one in (asked, new))

    assert client.post("/resume").json() == {"status": "resumed"}
    assert text_of(new) == "cd"
    MAY_END.set()
    text = text_of(asked)
    assert "ab" + text == (LETTERS * len(text))[: 2 + len(text)]
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_probes_and_the_state_of_the_server_say_that_it_is_paused(client):
    client.post("/pause", params={"mode": "keep"})
    probes = {path: client.get(path) for path in ("/health", "/readyz", "/livez", "/health_generate")}
    info = client.get("/server_info").json()
    assert paused_engines(client) == [1] * REPLICAS

    assert [one.status_code for one in probes.values()] == [200, 503, 200, 503]
    assert {one.json()["status"] for one in probes.values()} | {info["status"]} == {"paused"}
    client.post("/resume")
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/server_info").json()["status"] == "ready"
    assert until(lambda: paused_engines(client) == [0] * REPLICAS)


def test_answers_are_finished_first_if_the_pause_waits_for_them(client, ask):
    asked = ask(rid="mine")
    assert has_begun(client)
    with ThreadPoolExecutor(1) as one:
        pausing = one.submit(client.post, "/pause", params={"mode": "wait"})
        assert until(lambda: client.get("/is_paused").json()["is_paused"])
        assert not pausing.done()
        MAY_END.set()
        assert pausing.result().status_code == 200

    assert sum(counts(client).values()) == 0
    assert asked.result().json()["choices"][0]["finish_reason"] == "stop"


def test_answers_end_with_what_they_have_if_the_pause_aborts_them(client, ask):
    asked = ask(rid="mine")
    assert has_begun(client)
    client.post("/pause").raise_for_status()  # as vLLM's, which aborts unless told otherwise
    choice = asked.result().json()["choices"][0]

    assert choice["finish_reason"] == "abort"
    assert len(choice["text"]) > 0


def test_a_client_that_is_aborted_does_not_wait_for_the_resume(client, ask):
    client.post("/pause", params={"mode": "keep"})
    left = ask(rid="left")
    assert until(lambda: counts(client)["waiting"] == 1)
    client.post("/abort_request", json={"rid": "left"}).raise_for_status()

    assert left.result().json()["choices"][0]["finish_reason"] == "abort"
    assert client.get("/is_paused").json() == {"is_paused": True}


def test_a_client_that_is_out_of_time_does_not_wait_for_the_resume(tmp_path):
    with serving(tmp_path, letters_device(), ServerConfig(request_timeout=0.2)) as client:
        client.post("/pause", params={"mode": "keep"})
        late = client.post("/v1/completions", json={"prompt": "ab"})

        assert error_of(late)["code"] == "request_timed_out"
        assert client.get("/is_paused").json() == {"is_paused": True}


def test_a_pause_that_nobody_ends_is_over_after_its_time(client, ask, caplog):
    client.post("/pause", params={"mode": "keep", "max_s": 0.3}).raise_for_status()

    assert len(text_of(ask(3))) == 3
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert "The pause was not ended within 0.3 seconds; the server goes on." in caplog.text


def test_a_pause_that_is_resumed_while_it_waits_says_so(client, ask):
    asked = ask(rid="mine")
    assert has_begun(client)
    with ThreadPoolExecutor(1) as one:
        pausing = one.submit(client.post, "/pause", params={"mode": "wait"})
        assert until(lambda: client.get("/is_paused").json()["is_paused"])
        client.post("/resume").raise_for_status()
        refused = pausing.result()

    assert (refused.status_code, error_of(refused)["code"]) == (409, "not_paused")
    MAY_END.set()
    assert asked.result().json()["choices"][0]["finish_reason"] == "stop"


def test_the_cache_is_flushed_only_if_that_is_asked(client, ask):
    def cached_tokens() -> int:
        usage = ask(1, prompt="abcdefgh" * 10).result().json()["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    for _ in range(2 * REPLICAS):  # every replica has it
        cached_tokens()
    client.post("/pause", params={"mode": "keep"}).raise_for_status()
    client.post("/resume")
    assert cached_tokens() > 0
    client.post("/pause", params={"mode": "keep", "clear_cache": True}).raise_for_status()
    client.post("/resume")
    assert cached_tokens() == 0


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({"mode": "gently"}, "mode", "'abort', 'keep' or 'wait'"),
        ({"max_s": 0}, "max_s", "greater than 0"),
        ({"max_s": "nan"}, "max_s", "less than or equal to 86400"),
        ({"clear_cache": "perhaps"}, "clear_cache", "boolean"),
        ({"level": 1}, "level", "'level' is not known"),
    ],
)
def test_a_pause_that_is_asked_for_wrongly_is_refused_and_changes_nothing(client, params, param, words):
    refused = client.post("/pause", params=params)

    assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    assert words in error_of(refused)["message"]
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_pauses_are_the_operators_and_leave_lines(tmp_path, caplog):
    caplog.set_level(logging.INFO, "rota.audit")
    user, boss = {"x-api-key": "sk-user"}, {"x-api-key": "sk-boss"}
    with serving(tmp_path, letters_device(), keys=RING) as client:
        for path in ("/pause", "/resume"):
            assert client.post(path, headers=user).status_code == 403
        client.post("/pause", params={"mode": "keep"}, headers=boss).raise_for_status()
        client.post("/resume", headers=boss).raise_for_status()

    lines = [record.fields for record in caplog.records if record.name == "rota.audit"]
    assert [(line["action"], line["key"], line["outcome"] == "ok") for line in lines] == [
        ("pause", "user", False),
        ("resume", "user", False),
        ("pause", "boss", True),
        ("resume", "boss", True),
    ]
    assert lines[2]["mode"] == "keep"


def test_what_vllms_clients_ask_before_they_train_is_answered(client):
    config = client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    refused = client.get("/server_info", params={"config_format": "text"})

    assert config["lora_config"] == {"max_lora_rank": 16, "max_loras": 2}
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["max_model_len"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert "vllm_config" not in client.get("/server_info").json()
    assert (refused.status_code, error_of(refused)["param"]) == (400, "config_format")
    assert client.get("/get_world_size").json() == {"world_size": REPLICAS}
    assert client.get("/get_world_size", params={"include_dp": False}).json() == {"world_size": 1}


def test_a_trainers_round_is_answered_as_trl_reads_it(client, ask):
    """TRL's own calls: the next adapter is loaded during a pause, asked for, and the one before is unloaded."""
    for name in ("policy-v1", "policy-v2"):
        client.post("/pause", params={"mode": "keep"}, timeout=TIMEOUT_S).raise_for_status()
        load = {"lora_name": name, "lora_path": f"/adapters/{name}", "load_inplace": False}
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert client.post("/resume").status_code == 200
        fields = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "n": 1, "seed": 2**63 - 1}
        rollout = ask(9, model=name, prompt=[*b"ab"], return_token_ids=True, logprobs=0, **fields).result()
        choice = rollout.json()["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
        assert all(score <= 0.0 for score in choice["logprobs"]["token_logprobs"])
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "policy-v1"}).status_code == 200
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["letters", "pirate", "policy-v2"]
    client.delete("/v1/adapters/policy-v2").raise_for_status()


def test_an_adapter_gets_a_new_version_during_a_pause(client, ask):
    asked = ask(model="pirate", rid="mine")
    assert has_begun(client)
    client.post("/pause", params={"mode": "keep"}).raise_for_status()
    renewed = client.put("/v1/adapters/pirate", json={"path": "/adapters/other"})
    new = ask(2, model="pirate")
    assert until(lambda: sum(counts(client).values()) == 2)
    client.post("/resume").raise_for_status()

    assert renewed.json()["version"] == 2
    assert text_of(new) == "cd"
    MAY_END.set()
    assert [one.result().headers["x-rota-adapter-version"] for one in (asked, new)] == ["1", "2"]
