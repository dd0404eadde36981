"""Measures what the front end adds: the server as `rota serve` builds it, its engine process around a device that
only keeps time. How old is a token when its client has it, does that or the memory grow, how soon is the first one?
And how old would it be with the least of servers, which is what of it the machine and the client take?

python benchmarks/front_end.py [--duration 300] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from front import bare
from front.clients import Window, first_tokens, token_ages
from front.serving import model_folder, serve, serving
from front.ticks import TickReader

from rota.bench.questions import random_text
from rota.observe.summary import spread
from rota.text.tokenizer import Tokenizer

STREAMS = 64
STEP_S = 0.01  # a hundred tokens a second for each stream
ANSWER_TOKENS = 1000
PROMPT_TOKENS = 512
FIRST_TOKENS = 200
WARM_UP = 20  # first requests that do not count: the server imports and compiles what it needs
ASKED = {"token_p99_ms": 10.0, "first_token_median_ms": 5.0}


def measure_tokens(duration_s: float, tokenizer: Tokenizer, is_bare: bool = False) -> dict[str, Any]:
    window_s = max(1.0, duration_s / 10.0)
    ticks = TickReader(tokenizer, STEP_S)
    with serving(Path(__file__), STEP_S, is_bare) as served:
        before = {"client": time.process_time(), **served.cpu_s()}
        windows = asyncio.run(token_ages(served, ticks, STREAMS, ANSWER_TOKENS, duration_s, window_s))
        after = {"client": time.process_time(), **served.cpu_s()}
    tokens = sum(len(window.ages) for window in windows)
    # The first window holds everybody's start at once.
    steady = windows[1:]
    ages = np.concatenate([np.frombuffer(window.ages) for window in steady])
    return {
        "streams": STREAMS,
        "tokens_per_s": round(len(ages) / (window_s * len(steady))),
        "asked_tokens_per_s": round(STREAMS / STEP_S),
        "added_ms": _milliseconds(ages),
        "cpu_us_per_token": {name: round((after[name] - before[name]) / tokens * 1e6, 1) for name in after},
        "windows": [_window(window) for window in windows],
    }


def measure_first_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    with serving(Path(__file__), 0.0) as served:
        taken = asyncio.run(first_tokens(served, PROMPT_TOKENS, WARM_UP + FIRST_TOKENS))[WARM_UP:]
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "requests": FIRST_TOKENS,
        "added_ms": _milliseconds(taken),
        "of_which_tokenizing_median_ms": round(_tokenizing_s(tokenizer) * 1e3, 2),
    }


def _tokenizing_s(tokenizer: Tokenizer) -> float:
    taken = []
    for number in range(FIRST_TOKENS):
        text = random_text(random.Random(f"alone {number}"), PROMPT_TOKENS)
        began = time.perf_counter()
        tokenizer.encode(text)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _window(window: Window) -> dict[str, Any]:
    rss = {f"{name}_rss_mb": round(value, 1) for name, value in window.rss_mb.items()}
    return {"tokens": len(window.ages), "p99_ms": _milliseconds(np.frombuffer(window.ages))["p99"], **rss}


def _milliseconds(seconds: Any) -> dict[str, float]:
    return {name: round(value * 1e3, 2) for name, value in spread(seconds).items()}


def print_results(found: dict[str, Any]) -> None:
    tokens, first, floor = found["tokens"], found["first_token"], found["bare_server"]
    print(f"{tokens['streams']} streams, {tokens['tokens_per_s']:,} of {tokens['asked_tokens_per_s']:,} tokens/s")
    print(f"added to a token       {tokens['added_ms']}  (asked: p99 ≤ {ASKED['token_p99_ms']:g} ms)")
    print(f"  by a bare server     {floor['added_ms']}")
    print(f"CPU, µs a token        {tokens['cpu_us_per_token']}, a bare server {floor['cpu_us_per_token']}")
    print(f"added to a first token {first['added_ms']}  (asked: median ≤ {ASKED['first_token_median_ms']:g} ms)")
    print(f"  of which tokenizing  {first['of_which_tokenizing_median_ms']} ms")
    for number, window in enumerate(tokens["windows"]):
        print(f"window {number}: {window}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of streaming; 300 for the record")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    parser.add_argument("--serve", type=float, metavar="STEP_S", help=argparse.SUPPRESS)
    parser.add_argument("--serve-bare", type=float, metavar="STEP_S", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    if options.serve_bare is not None:
        bare.serve(options.serve_bare)
        return
    if options.duration < 3.0:
        parser.error("--duration must be at least 3 seconds")
    tokenizer = Tokenizer(model_folder())
    found = {
        "command": f"python benchmarks/front_end.py --duration {options.duration:g}",
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "asked": ASKED,
        "tokens": measure_tokens(options.duration, tokenizer),
        "bare_server": measure_tokens(max(3.0, options.duration / 5.0), tokenizer, is_bare=True),
        "first_token": measure_first_tokens(tokenizer),
    }
    print_results(found)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
