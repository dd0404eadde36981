"""Watches one streamed answer after the other, and prints when each of its tokens came, until it is told to stop.

    python -m benchmarks.h200.gaps URL MODEL TOKENS

A process of its own: whoever sends 84 MB in the same process would see gaps of its own making. A line on stdin, or its
end, stops it. Then it prints a JSON list of answers, each a list of moments of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import httpx

from rota.runtime.lifeline import tied

Moments = list[list[float]]


class GapWatch:
    """The process, from the side that starts it."""

    def __init__(self, url: str, model: str, tokens: int) -> None:
        command = [sys.executable, "-m", "benchmarks.h200.gaps", url, model, str(tokens)]
        self._process = subprocess.Popen(tied([*command]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop(self, limit_s: float = 60.0) -> Moments:
        """What it has seen; the answer under way is not waited for."""
        told, _ = self._process.communicate("stop\n", timeout=limit_s)
        return list(json.loads(told))


def gaps_of(answers: Moments, spans: list[tuple[float, float]] | None = None) -> list[float]:
    """Seconds between two tokens of an answer; with spans only gaps that one of these meets."""
    found = [(before, after) for answer in answers for before, after in pairwise(answer)]
    if spans is not None:
        found = [gap for gap in found if any(begin < gap[1] and gap[0] < end for begin, end in spans)]
    return [after - before for before, after in found]


def watch(url: str, model: str, tokens: int, has_to_stop: threading.Event) -> Moments:
    answers: Moments = []
    body: dict[str, Any] = {"model": model, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=60.0) as client:
        while not has_to_stop.is_set():
            answers.append([])
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        answers[-1].append(time.monotonic())
                    if has_to_stop.is_set():
                        break
    return answers


def main() -> None:
    url, model, tokens = sys.argv[1:]
    has_to_stop = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        has_to_stop.set()

    threading.Thread(target=listen, daemon=True).start()
    print(json.dumps(watch(url, model, int(tokens), has_to_stop)))


if __name__ == "__main__":
    main()
