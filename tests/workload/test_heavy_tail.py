"""Lengths with a heavy tail have the median and the P99 that a scenario names, and end at max_tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rota.core.errors import ConfigError
from rota.core.events import FinishReason
from rota.sim.run import Simulation
from rota.workload.arrivals import asks
from rota.workload.scenario import Client, HeavyTail, Scenario, read_scenario
from tests.costs import constant_cost

SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"
HEAVY = HeavyTail(median=60, p99=900)


def answers(seed: int = 0, requests: int = 20_000, **fields: object) -> list[int]:
    client = Client(requests=requests, rate_per_s=4.0, **{"output_tokens": HEAVY, **fields})
    return [ask.output_tokens for ask in asks(client, seed)]


def refusal(path: Path, lengths: str) -> str:
    path.write_text(f"[[clients]]\nrequests = 1\nrate_per_s = 1.0\noutput_tokens = {lengths}\n")
    with pytest.raises(ConfigError) as error:
        read_scenario(path)
    return str(error.value)


def test_half_are_at_most_the_median_and_one_in_a_hundred_is_above_p99():
    found = sorted(answers())

    assert found[len(found) // 2] == pytest.approx(60, rel=0.03)
    assert found[len(found) * 99 // 100] == pytest.approx(900, rel=0.1)
    assert sum(found) / len(found) == pytest.approx(118, rel=0.05)  # twice the median: the tail weighs as much
    assert found[0] >= 1


def test_the_same_seed_draws_the_same_lengths_and_another_seed_others():
    assert answers(requests=50) == answers(requests=50)
    assert answers(requests=50) != answers(requests=50, seed=1)


def test_an_answer_ends_at_max_tokens_and_shorter_ones_end_by_themselves():
    client = Client(requests=300, rate_per_s=50.0, prompt_tokens=(1, 8), output_tokens=HEAVY, max_tokens=200)
    drawn = [ask.output_tokens for ask in asks(client, seed=0)]
    scenario = Scenario(name="heavy", clients=(client,))
    records = Simulation(scenario=scenario, costs=constant_cost(seconds=0.01)).run().records.values()

    assert max(drawn) > 900
    assert [one.tokens for one in records] == [min(length, 200) for length in drawn]
    assert [one.reason is FinishReason.LENGTH for one in records] == [length > 200 for length in drawn]


def test_a_length_is_cut_where_two_of_a_million_are_longer():
    class Unlucky(random.Random):
        def lognormvariate(self, mu: float = 0.0, sigma: float = 1.0) -> float:
            return 1e9

    assert HEAVY.draw(Unlucky()) == HEAVY.longest == 13_500
    assert HeavyTail(median=1, p99=900_000).longest == 1_000_000


def test_prompts_may_have_a_heavy_tail_too():
    client = Client(requests=1000, rate_per_s=4.0, prompt_tokens=HEAVY)
    lengths = [ask.prompt_tokens for ask in asks(client, seed=0)]

    assert max(lengths) > 512
    assert client.longest == 13_500 + 512


def test_the_longest_request_has_room_for_its_limit():
    client = Client(requests=1, rate_per_s=4.0, prompt_tokens=(1, 512), output_tokens=HEAVY, max_tokens=4096)

    assert client.longest == 512 + 4096


def test_uniform_lengths_are_drawn_as_before():
    """Published figures hang on it."""
    (client,) = read_scenario(SCENARIOS / "tail-ttft.toml").clients
    first = [(ask.prompt_tokens, ask.output_tokens) for ask, _ in zip(asks(client, seed=0), range(3), strict=False)]

    assert first == [(498, 415), (224, 143), (151, 318)]


def test_crowd_heavy_is_crowd_at_15_4_per_second_with_other_answers():
    (crowd,), (heavy,) = (read_scenario(SCENARIOS / f"{name}.toml").clients for name in ("crowd", "crowd-heavy"))

    assert (heavy.rate_per_s, heavy.output_tokens, heavy.max_tokens) == (15.4, HEAVY, 4096)
    assert (heavy.requests, heavy.prompt_tokens, heavy.adapters) == (
        crowd.requests,
        crowd.prompt_tokens,
        crowd.adapters,
    )


def test_tail_ttft_unknown_asks_what_tail_ttft_asks_and_its_requests_name_one_limit():
    (known,), (unknown,) = (
        read_scenario(SCENARIOS / f"{name}.toml").clients for name in ("tail-ttft", "tail-ttft-unknown")
    )
    for seed in (0, 1):
        pairs = list(zip(asks(known, seed), asks(unknown, seed), strict=True))
        assert all(
            (one.at, one.adapter_id, one.prompt_tokens, one.output_tokens)
            == (other.at, other.adapter_id, other.prompt_tokens, other.output_tokens)
            for one, other in pairs
        )
        assert {other.max_tokens for _, other in pairs} == {4096}


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ("{ median = 60, p99 = 60 }", "output_tokens: median and p99 must be tokens with 1 <= median < p99 <= 1000000"),
        ("{ median = 900, p99 = 60 }", "not 900 and 60."),
        ("{ median = 0, p99 = 60 }", "not 0 and 60."),
        ("{ median = nan, p99 = 60 }", "not nan and 60."),
        ("{ median = 60, p99 = inf }", "not 60 and inf."),
        ('{ median = "sixty", p99 = 900 }', "output_tokens: median must be a number, not 'sixty'"),
        ("{ median = 60 }", "output_tokens must be two whole numbers, [low, high], or a table with median and p99"),
        ("{ median = 60, p99 = 900, p50 = 1 }", "output_tokens must be two whole numbers"),
        ("{ mean = 60, p99 = 900 }", "output_tokens must be two whole numbers"),
    ],
)
def test_a_tail_that_cannot_be_is_named_with_its_client_and_field(tmp_path, lengths, words):
    sentence = refusal(tmp_path / "day.toml", lengths)

    assert sentence.startswith(f"{tmp_path / 'day.toml'}, client 1: output_tokens")
    assert words in sentence
