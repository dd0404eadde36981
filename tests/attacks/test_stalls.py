"""Attacks 9 and 10: an engine that stands still, and a crowd of prompts beside a neighbour's stream."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.attacks.live import Server, neighbour, serving
from tests.waiting import until

# Attack 9: an engine is stopped for a while, goes on, and is stopped for good.

SILENCE_S = 20.0  # the default of --engine-silence-s
PAUSE_S = 12.0


@pytest.mark.long("an engine is silent for 32 seconds in all")
def test_an_engine_that_once_stood_still_is_found_as_soon_as_any_other(tmp_path, record_property):
    with serving(tmp_path) as server:
        first = pid_of(server)
        body = {"prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with server.boss.client.stream("POST", "/v1/completions", json=body) as stream:
            # The operator's: others are not told why an engine died.
            lines = (line for line in stream.iter_lines() if line.startswith("data:"))
            tokens_of(lines, 20)
            os.kill(first, signal.SIGSTOP)
            time.sleep(PAUSE_S)  # time is what is tested
            os.kill(first, signal.SIGCONT)
            tokens_of(lines, 20)
            os.kill(first, signal.SIGSTOP)
            stopped_at = time.monotonic()
            last = next(line for line in lines if '"error"' in line)
        record_property("found_after_s", round(time.monotonic() - stopped_at, 1))

        assert f"it said nothing for {SILENCE_S:g} seconds" in last
        assert until(lambda: pid_of(server) not in (None, first)), "no other engine came"
        assert server.birds.ask("pirate").status_code == 200


def tokens_of(lines: object, count: int) -> None:
    for _ in range(count):
        line = next(lines)
        assert '"error"' not in line, line


def pid_of(server: Server) -> int | None:
    (engine,) = server.boss.client.get("/server_info").json()["replicas"]
    return engine["pid"]


# Attack 10: on a CPU, eight prompts of 300 tokens at once beside a neighbour's stream.

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
