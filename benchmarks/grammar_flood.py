"""Measures how late tokens come while other clients send nothing but grammars of the worst kind.

python benchmarks/grammar_flood.py --url URL [--clients 2] [--tokens 300] [--rounds 4] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

TIMEOUT_S = 60.0
# Each takes much processor time to read, or many rules. No two calls have the same.
HOSTILE: tuple[dict[str, Any], ...] = (
    {"guided_json": {"type": "integer", "multipleOf": 999983}},
    {"guided_regex": r"(\p{L}{1,60}\s?){1,60}"},
    {"guided_json": {"properties": {f"name {count}": {} for count in range(1500)}}},
    {"guided_grammar": 'root ::= root root root | "a" root | "b"'},
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with httpx.Client(base_url=arguments.url, timeout=TIMEOUT_S) as client:
        quiet = [gap for _ in range(arguments.rounds) for gap in gaps(client, arguments.tokens)]
        with flooded(arguments.url, arguments.clients) as answers:
            time.sleep(1)
            beside = [gap for _ in range(arguments.rounds) for gap in gaps(client, arguments.tokens)]
    result = {
        "ms_between_tokens": {"without": summary(quiet), "with": summary(beside)},
        "hostile_calls": len(answers),
        "refused": sum(status == 400 for status, _ in answers),
        "ms_of_a_hostile_call": summary([took_s for _, took_s in answers]),
    }
    report = json.dumps(result, indent=2)
    print(report)
    if arguments.output:
        arguments.output.write_text(report + "\n")


def hostile(count: int) -> dict[str, Any]:
    """Fields of a call; those of another count are another grammar."""
    ((field, value),) = HOSTILE[count % len(HOSTILE)].items()
    return {field: {**value, "title": str(count)} if isinstance(value, dict) else value + " " * count}


@contextmanager
def flooded(url: str, clients: int) -> Iterator[list[tuple[int, float]]]:
    """The status and the duration of each hostile call so far."""
    answers: list[tuple[int, float]] = []
    counts, has_ended = itertools.count(), threading.Event()

    def flood() -> None:
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            while not has_ended.is_set():
                body = {"prompt": "a", "max_tokens": 1, **hostile(next(counts))}
                started_at = time.monotonic()
                status = client.post("/v1/completions", json=body).status_code
                answers.append((status, time.monotonic() - started_at))

    threads = [threading.Thread(target=flood) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def gaps(client: httpx.Client, tokens: int) -> list[float]:
    """The time between the tokens of one answer."""
    body = {"prompt": "abc", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
    return [after - before for before, after in itertools.pairwise(times)]


def summary(seconds: Sequence[float]) -> dict[str, float]:
    ranked = sorted(seconds)
    p99 = ranked[int(0.99 * len(ranked))]
    return {
        name: round(1e3 * value, 1) for name, value in (("median", median(ranked)), ("p99", p99), ("max", ranked[-1]))
    }


if __name__ == "__main__":
    main()
