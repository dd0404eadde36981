from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rota.bench.config import BenchConfig
from rota.bench.run import BenchRun, bench
from rota.cli import main
from rota.core.errors import ConfigError
from rota.observe.summary import jain
from tests.bench.servers import FakeServer
from tests.waiting import TIMEOUT_S

FIGURES = {"mean", "median", "p90", "p95", "p99", "max"}


SHORT = {
    "dataset_name": "random-ids",
    "num_prompts": 6,
    "random_input_len": 8,
    "random_output_len": 5,
    "random_range_ratio": 1.0,
}


def run(server: FakeServer, **fields: Any) -> BenchRun:
    """A short run of token ids, unless a scenario is named; a test says what is special about it."""
    defaults = {"warmup_requests": 0, **({} if "scenario" in fields else SHORT)}
    with server.running() as url:
        return asyncio.run(bench(BenchConfig(base_url=url, **{**defaults, **fields}), lambda _: lambda: None))


@pytest.mark.parametrize("backend", ["rota", "vllm", "openai", "sglang"])
def test_every_answer_is_followed_to_its_last_token(backend):
    found = run(FakeServer(step_s=0.05), backend=backend).report()

    assert (found["requests"], found["failed"], found["left"]) == (6, 0, 0)
    assert (found["input_tokens"], found["output_tokens"]) == (48, 30)
    assert 0.01 <= found["ttft_s"]["median"] < found["e2e_s"]["median"] < TIMEOUT_S
    assert found["e2e_s"]["median"] - found["ttft_s"]["median"] >= 0.1
    for name in ("ttft_s", "e2e_s", "tpot_s", "itl_s", "gap_s", "stall_s"):
        assert found[name].keys() == FIGURES


def test_servers_of_every_kind_are_asked_the_same():
    asked: dict[str, Any] = {}
    for backend in ("rota", "vllm", "openai", "sglang"):
        server = FakeServer()
        run(server, backend=backend, lora_name=("a", "b"), max_concurrency=1, random_range_ratio=0.0)
        asked[backend] = [_meaning(body) for body in server.asked]

    assert len({prompt for prompt, _, _ in asked["rota"]}) == 6
    assert asked["rota"] == asked["vllm"] == asked["openai"] == asked["sglang"]


def _meaning(body: dict[str, Any]) -> tuple[tuple[int, ...], int, str]:
    if "input_ids" in body:
        return tuple(body["input_ids"]), body["sampling_params"]["max_new_tokens"], body["lora_path"]
    return tuple(body["prompt"]), body["max_tokens"], body["model"]


@pytest.mark.parametrize(
    ("fields", "is_sent"),
    [({}, True), ({"disable_ignore_eos": True}, False), ({"backend": "openai"}, False)],
)
def test_answers_run_to_their_full_length_unless_told_otherwise(fields, is_sent):
    server = FakeServer()
    run(server, **fields)
    assert [body.get("ignore_eos", False) for body in server.asked] == [is_sent] * 6


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ("broken", "The engine died."),
        ("endless", "the stream broke off before its end"),
        ("aborted", "the answer ended by 'abort'"),
        ("unknown", "status 404: There is no model 'unknown'."),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure_with_its_reason(adapter, words):
    found = run(FakeServer(), lora_name=(adapter, "a"), lora_request_distribution="distinct").report()

    assert (found["requests"], found["failed"]) == (6, 3)
    assert found["problems"] == {words: 3}
    assert found["adapters"][adapter]["failed"] == 3
    assert found["adapters"]["a"]["failed"] == 0
    assert found["output_tokens"] == 15


def test_a_server_that_says_nothing_for_too_long_has_failed():
    found = run(FakeServer(step_s=30.0), num_prompts=1, stall_timeout_s=1.0).report()
    assert found["problems"] == {"nothing came for too long": 1}


def test_every_adapter_and_the_base_have_their_own_figures_and_one_index_says_how_fair_it_was():
    found = run(FakeServer(), lora_name=("a", "b"), base_share=0.4, num_prompts=30).report()

    assert list(found["adapters"]) == ["base", "a", "b"]
    assert sum(one["requests"] for one in found["adapters"].values()) == 30
    assert found["fairness"] == jain([found["adapters"][name]["ttft_s"]["mean"] for name in ("a", "b")])


def test_a_gate_keeps_no_more_than_so_many_open():
    server = FakeServer(answers_from=3)
    run(server, num_prompts=20, max_concurrency=3)
    assert server.most_open == 3


def test_an_open_loop_does_not_wait_for_answers():
    server = FakeServer(answers_from=20)
    found = run(server, num_prompts=20, request_rate=400.0)
    assert server.most_open == 20
    assert len(found.late_s) == 20


def test_clients_who_leave_close_their_connection_and_have_not_failed():
    server = FakeServer(step_s=0.02)
    found = run(server, num_prompts=4, random_output_len=100_000, cancel_share=1.0, cancel_within_s=0.2).report()

    assert (found["failed"], found["left"], found["problems"]) == (0, 4, {})
    assert server.gone.wait(TIMEOUT_S)


def test_a_warm_up_is_asked_and_not_counted():
    server = FakeServer()
    found = run(server, warmup_requests=2).report()
    assert (len(server.asked), found["requests"]) == (8, 6)


def test_a_key_goes_with_every_request():
    server = FakeServer()
    run(server, api_key="secret")
    assert {one["authorization"] for one in server.headers} == {"Bearer secret"}


def test_a_key_may_come_by_the_environment_and_an_address_lack_its_scheme(monkeypatch):
    server = FakeServer()
    monkeypatch.setenv("ROTA_API_KEY", "secret")
    with server.running() as url, pytest.raises(SystemExit) as ended:
        main(["bench", "--base-url", url.removeprefix("http://"), "--num-prompts", "2", "--random-input-len", "8"])

    assert ended.value.code == 0
    assert {one["authorization"] for one in server.headers} == {"Bearer secret"}


def test_a_scenario_takes_its_adapters_from_the_servers_list_and_brings_guests(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        "transients = 2\ntransient_every_s = 0.1\n[[clients]]\nrequests = 10\nconcurrency = 2\nadapters = 2\n"
        "prompt_tokens = [4, 4]\noutput_tokens = [2, 2]\n"
    )
    server = FakeServer()
    found = run(server, scenario=str(path)).report()

    assert (found["requests"], found["failed"], found["problems"]) == (12, 0, {})
    assert list(found["adapters"]) == ["a", "b", "transients"]
    assert found["fairness"] == jain([found["adapters"][name]["ttft_s"]["mean"] for name in ("a", "b")])
    # On a slow machine the second guest comes before the first has left.
    told = sorted((path.split("_")[0], fields.get("lora_path") or "") for path, fields in server.told)
    assert told == [("/v1/load", "/adapters/a"), ("/v1/load", "/adapters/b"), ("/v1/unload", ""), ("/v1/unload", "")]
    transients = [fields["lora_name"] for path, fields in server.told if "unload" in path]
    assert [body["model"] for body in server.asked if body["model"] in transients] == transients


def test_nobody_at_the_address_is_one_sentence():
    with pytest.raises(ConfigError, match=r"There is no answer at http://127\.0\.0\.1:9/v1/models"):
        asyncio.run(bench(BenchConfig(port=9), lambda _: lambda: None))


def test_a_server_that_refuses_the_warm_up_is_not_measured():
    server = FakeServer()
    with pytest.raises(ConfigError, match="does not answer a first short request: status 404"):
        run(server, model="unknown", warmup_requests=1)
