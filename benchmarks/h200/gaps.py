"""Watches one streamed answer after the other, and tells when each of its tokens came.

    python -m benchmarks.h200.gaps URL MODEL TOKENS

A process of its own: whoever sends 84 MB in the same process would see gaps of its own making. It prints a line at its
first token. A line on stdin, or its end, stops it. Then it prints a JSON list of answers, each a list of moments of the
machine's monotonic clock. It collects no garbage meanwhile: what it keeps are numbers, and a pause of its own would
look like one of the server's.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import httpx

from rota.runtime.lifeline import tied

Moments = list[list[float]]
Span = tuple[float, float]


class GapWatch:
    """The process, from the side that starts it."""

    def __init__(self, url: str, model: str, tokens: int) -> None:
        command = [sys.executable, "-m", "benchmarks.h200.gaps", url, model, str(tokens)]
        self._process = subprocess.Popen(tied([*command]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Until it has seen a token, or has failed: on a busy machine it takes seconds to start."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def stop(self, limit_s: float = 60.0) -> Moments:
        """What it has seen; the answer under way is not waited for."""
        told, _ = self._process.communicate("stop\n", timeout=limit_s)
        assert self._process.returncode == 0, "the watch over an answer has failed; its reason stands above"
        return list(json.loads(told))


def gaps_of(answers: Moments, spans: Sequence[Span] | None = None) -> list[float]:
    """Seconds between two tokens of an answer; with spans only gaps that one of these meets."""
    return [after - before for before, after in _gaps(answers) if spans is None or _meets((before, after), spans)]


def gaps_apart(answers: Moments, spans: Sequence[Span]) -> list[float]:
    """The gaps between the first of the spans and the last that meet none of them: what the machine does by itself."""
    begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
    within = [gap for gap in _gaps(answers) if _meets(gap, [(begin, end)])]
    return [after - before for before, after in within if not _meets((before, after), spans)]


def _gaps(answers: Moments) -> Iterator[Span]:
    return (gap for answer in answers for gap in pairwise(answer))


def _meets(gap: Span, spans: Sequence[Span]) -> bool:
    return any(begin < gap[1] and gap[0] < end for begin, end in spans)


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
                        if len(answers) == len(answers[-1]) == 1:
                            print(flush=True)
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
    gc.disable()
    print(json.dumps(watch(url, model, int(tokens), has_to_stop)))


if __name__ == "__main__":
    main()
