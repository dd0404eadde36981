from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from rota.bench.config import BenchConfig
from rota.bench.questions import Question, read_workload, warmups
from rota.core.errors import ConfigError
from rota.core.ids import BASE, AdapterId
from rota.workload.arrivals import asks
from rota.workload.scenario import read_scenario

SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"
NAMES = tuple(f"lora{number}" for number in range(16))


def questions(**fields: object) -> list[Question]:
    fields = {"num_prompts": 200, "dataset_name": "random-ids", **fields}
    return [one for client in read_workload(BenchConfig(**fields)).clients for one in client.questions]


def test_the_same_seed_asks_the_same_and_another_seed_something_else():
    fields = {"lora_name": ("a", "b"), "request_rate": 5.0, "cancel_share": 0.3}
    assert questions(**fields) == questions(**fields)
    assert questions(**fields) != questions(**fields, seed=1)


@pytest.mark.parametrize("backend", ["sglang", "vllm", "openai"])
def test_which_server_is_asked_does_not_matter(backend):
    assert questions(backend=backend, port=1) == questions()


@pytest.mark.parametrize("name", ["tail-ttft", "base-isolation", "cancel-storm"])
def test_a_scenario_asks_what_the_simulator_asks_at_the_same_moments(name):
    path = SCENARIOS / f"{name}.toml"
    workload = read_workload(BenchConfig(scenario=str(path), seed=7), NAMES)

    for number, client in enumerate(read_scenario(path).clients):
        questions = workload.clients[number].questions
        expected = list(asks(client, seed=7 * 1000 + number))
        assert [
            (one.at, one.adapter_id, len(one.prompt), one.output_tokens, one.leaves_after_s) for one in questions
        ] == [(one.at, one.adapter_id, one.prompt_tokens, one.output_tokens, one.leaves_after_s) for one in expected]


def test_lengths_lie_between_the_ratio_and_the_whole():
    lengths = {len(one.prompt) for one in questions(random_input_len=100, random_range_ratio=0.8)}
    assert lengths <= set(range(80, 101))
    assert {80, 100} <= lengths
    assert {len(one.prompt) for one in questions(random_input_len=9, random_range_ratio=1.0)} == {9}


def test_text_has_as_many_words_as_tokens_were_asked_for():
    asked = questions(dataset_name="random", random_input_len=40, random_range_ratio=1.0)
    assert {len(one.prompt.split()) for one in asked} == {40}
    assert len({one.prompt for one in asked}) == 200


def test_token_ids_stay_within_the_vocabulary_and_out_of_its_control_tokens():
    ids = [token for one in questions(vocab_size=256) for token in one.prompt]
    assert min(ids) >= 25
    assert max(ids) < 256


def test_without_a_rate_all_ask_at_once_and_with_one_they_come_at_random():
    assert {one.at for one in questions()} == {one.at for one in questions(request_rate=math.inf)} == {0.0}
    moments = [one.at for one in questions(request_rate=4.0)]
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(50.0, rel=0.3)


def test_distinct_names_every_adapter_in_turn():
    asked = questions(lora_name=("a", "b", "c"), lora_request_distribution="distinct")
    assert [one.adapter_id for one in asked[:7]] == [1, 2, 3, 1, 2, 3, 1]


def test_skewed_names_each_adapter_alpha_times_as_often_as_the_next():
    asked = questions(
        lora_name=("a", "b", "c"),
        lora_request_distribution="skewed",
        lora_zipf_alpha=3.0,
        num_prompts=4000,
        random_input_len=1,
    )
    shares = Counter(one.adapter_id for one in asked)
    assert shares[AdapterId(1)] / shares[AdapterId(2)] == pytest.approx(3.0, rel=0.2)
    assert shares[AdapterId(2)] / shares[AdapterId(3)] == pytest.approx(3.0, rel=0.3)


def test_some_ask_the_base_model_and_some_leave():
    asked = questions(lora_name=("a",), base_share=0.5, cancel_share=0.25, cancel_within_s=2.0)
    assert 60 < sum(one.adapter_id == BASE for one in asked) < 140
    leaving = [one.leaves_after_s for one in asked if one.leaves_after_s is not None]
    assert 25 < len(leaving) < 80
    assert max(leaving) <= 2.0


def test_a_flag_takes_the_place_of_what_a_scenario_says():
    path = str(SCENARIOS / "tail-ttft.toml")
    plain = read_workload(BenchConfig(scenario=path), NAMES).clients[0]
    asked = read_workload(BenchConfig(scenario=path, num_prompts=50, request_rate=8.0, max_concurrency=5), NAMES)

    (client,) = asked.clients
    assert (len(client.questions), client.max_concurrency) == (50, 5)
    assert [one.at for one in client.questions] == pytest.approx([one.at / 2.0 for one in plain.questions[:50]])


ASKABLE = [path for path in sorted(SCENARIOS.glob("*.toml")) if not read_scenario(path).only_simulated]


@pytest.mark.parametrize("path", ASKABLE, ids=lambda path: path.stem)
def test_every_scenario_that_does_not_need_the_simulator_can_be_asked(path):
    names = tuple(f"lora{number}" for number in range(1000))
    workload = read_workload(BenchConfig(scenario=str(path), num_prompts=2), names)
    assert workload.requests == 2 * len(read_scenario(path).clients) + len(workload.transients)


def test_a_closed_loop_keeps_its_concurrency():
    (client,) = read_workload(BenchConfig(scenario=str(SCENARIOS / "osl-variance.toml"), num_prompts=5)).clients
    assert client.max_concurrency == 64


def test_a_trace_is_asked_line_by_line(tmp_path):
    path = tmp_path / "day.jsonl"
    lines = [
        {"at": 2.0, "prompt": "Hello", "output_tokens": 3, "adapter": "pirate"},
        {"at": 1.0, "prompt_tokens": 12, "output_tokens": 5},
        {"at": 3.0, "prompt": [7, 8, 9], "output_tokens": 1, "adapter": "haiku"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    workload = read_workload(BenchConfig(dataset_name="trace", dataset_path=str(path)))

    first, second, third = workload.clients[0].questions
    assert (first.at, first.adapter_id, len(first.prompt), first.output_tokens) == (1.0, BASE, 12, 5)
    assert (second.prompt, workload.name_of(second.adapter_id)) == ("Hello", "pirate")
    assert (third.prompt.tolist(), workload.name_of(third.adapter_id)) == ([7, 8, 9], "haiku")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"at": 1, "output_tokens": 2}', "line 1: a line has either prompt or prompt_tokens"),
        ('{"at": 1, "prompt_tokens": 0, "output_tokens": 2}', "prompt_tokens must be at least 1"),
        ('{"at": 1, "prompt": "x", "output_tokens": 2, "lora": "a"}', "lora"),
        ("hello", "line 1"),
        ("", "is empty"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_line(tmp_path, line, words):
    path = tmp_path / "day.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=words):
        read_workload(BenchConfig(dataset_name="trace", dataset_path=str(path)))


def test_a_scenario_needs_as_many_adapters_as_it_asks_for():
    with pytest.raises(ConfigError, match="tail-ttft asks for 6 adapters; the server lists 2"):
        read_workload(BenchConfig(scenario=str(SCENARIOS / "tail-ttft.toml")), ("a", "b"))


def test_warming_up_asks_nothing_that_counts():
    config = BenchConfig(num_prompts=5, warmup_requests=3, dataset_name="random-ids")
    asked = [one.prompt for one in read_workload(config).clients[0].questions]
    assert len(warmups(config)) == 3
    assert not any(one.prompt in asked for one in warmups(config))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dataset_name": "scenario"}, "name its file with --scenario"),
        ({"dataset_name": "trace"}, "name its file with --dataset-path"),
        ({"dataset_path": "x"}, "say --dataset-name trace"),
        ({"scenario": "x", "random_input_len": 5}, "random_input_len is for random prompts"),
        ({"scenario": "x", "dataset_name": "trace", "dataset_path": "y"}, "does not go with dataset_name 'trace'"),
        ({"dataset_name": "trace", "dataset_path": "x", "request_rate": 2.0}, "does not go with a trace"),
        ({"dataset_name": "trace", "dataset_path": "x", "lora_name": ("a",)}, "names its adapters"),
        ({"request_rate": 0.0}, "request_rate must be above 0"),
        ({"request_rate": math.nan}, "request_rate must be above 0"),
        ({"base_share": 1.5}, "base_share must be between 0 and 1"),
        ({"num_prompts": 0}, "num_prompts must be at least 1"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(fields, words):
    with pytest.raises(ConfigError, match=words):
        BenchConfig(**fields)


def test_a_client_s_prompts_share_the_tokens_that_its_scenario_says(tmp_path):
    path = tmp_path / "shared.toml"
    rows = "requests = 5\nrate_per_s = 1.0\nprompt_tokens = [20, 30]\nshared_prefix_tokens = 16\n"
    path.write_text(f"[[clients]]\n{rows}[[clients]]\n{rows}")
    first, second = read_workload(BenchConfig(scenario=str(path))).clients

    beginnings = [{tuple(one.prompt[:16]) for one in client.questions} for client in (first, second)]
    assert [len(one) for one in beginnings] == [1, 1]
    assert beginnings[0] != beginnings[1]
    assert len({one.prompt[16] for one in first.questions}) > 1


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("priority", "{rows}priority = 1\n"),
        ("max_tokens", "{rows}max_tokens = 100\n"),
        ("transient_requests", "transients = 1\ntransient_requests = 2\n{rows}"),
    ],
)
def test_what_only_the_simulator_can_do_is_refused_by_name(tmp_path, field, text):
    path = tmp_path / "simulated.toml"
    path.write_text(text.format(rows="[[clients]]\nrequests = 1\nrate_per_s = 1.0\nadapters = 1\n"))

    with pytest.raises(ConfigError, match=f"simulated has {field}, which only 'rota simulate' can do"):
        read_workload(BenchConfig(scenario=str(path)), NAMES)
