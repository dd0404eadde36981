"""Attack 10: on a CPU, eight prompts of 300 tokens at once beside a neighbour's stream."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.attacks.live import Server, neighbour, serving

PROMPTS, TOKENS = 8, 300


@pytest.mark.long("2,400 tokens of prompts on a CPU")
def test_a_crowd_of_prompts_does_not_stop_a_stream(tmp_path, record_property):
    """By the number of tokens alone, the crowd would be two or three steps, and the stream would get as many tokens."""
    with serving(tmp_path, "--device", "cpu") as server:
        with neighbour(server) as gaps, ThreadPoolExecutor(PROMPTS) as crowd:
            answers = list(crowd.map(lambda number: ask(server, number), range(PROMPTS)))

        record_property("gaps", f"{gaps}, {gaps.tokens} tokens")
        assert answers == [200] * PROMPTS
        assert not gaps.problems
        assert gaps.tokens >= 20


def ask(server: Server, number: int) -> int:
    dice = random.Random(number)
    prompt = [dice.randrange(100, 40_000) for _ in range(TOKENS)]
    body = {"model": "pirate", "prompt": prompt, "max_tokens": 1}
    return server.acme.client.post("/v1/completions", json=body).status_code
