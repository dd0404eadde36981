"""Measures what an engine elsewhere costs: the same device that computes nothing, behind a local engine process and
behind a remote one over TCP with keys, in turns. How much later is the first token, and what does a token cost the
front's processor? Both engines are on this machine, so a network's own time is not in these figures.

python benchmarks/remote_engine.py [--rounds 16] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from front.clients import token_ages
from front.elsewhere import remote_engine
from front.paced import PacedDevice
from front.serving import Served, model_folder, serve, started
from front.ticks import CYCLE, TickReader

import rota.commands.engines
from rota.core.config import EngineConfig
from rota.core.events import Event, Finished, Produced
from rota.core.ids import RequestId
from rota.core.request import Request, SamplingParams
from rota.runtime.process import EngineProcess
from rota.runtime.supervisor import NewEngine, SupervisedService
from rota.text.tokenizer import Tokenizer

ENGINES: dict[str, NewEngine] = {"local": EngineProcess, "remote": remote_engine}
ASKED = {"added_to_first_token_ms": 1.0, "front_cpu_per_token": 1.1}
PROMPT_TOKENS = 512
FIRST_TOKENS, WARM_UP = 100, 10  # of a round
STREAMS, STEP_S, ANSWER_TOKENS, STREAMING_S = (4, 32), 0.02, 500, 2.0
ROWS, STEPS = (1, 32), 1000  # of a round without HTTP


class Bench:
    """A service without HTTP, and what it last said."""

    def __init__(self, new_engine: NewEngine, step_s: float) -> None:
        device = partial(PacedDevice, step_s, (5,) * CYCLE)
        self._service = SupervisedService(device, EngineConfig(), new_engine=new_engine)
        self._said, self._first_at, self._open = threading.Event(), 0.0, 0
        self._service.start(self._hear)
        self._service.wait_until_ready(60.0)
        self._count = 0

    def first_token_s(self) -> float:
        asked_at = time.perf_counter()
        self._ask(requests=1, tokens=2)
        return self._first_at - asked_at

    def cpu_s(self, rows: int) -> float:
        """Of this process, a step: while so many requests get a token in each."""
        began = time.process_time()
        self._ask(rows, STEPS)
        return (time.process_time() - began) / STEPS

    def stop(self) -> None:
        self._service.stop()

    def _ask(self, requests: int, tokens: int) -> None:
        self._said.clear()
        self._first_at, self._open = 0.0, requests
        for _ in range(requests):
            self._count += 1
            self._service.send(submit(self._count, tokens))
        if not self._said.wait(120.0):
            raise RuntimeError("no answer within two minutes")

    def _hear(self, events: list[Event]) -> None:
        at = time.perf_counter()
        for event in events:
            if isinstance(event, Produced) and event.request_ids and not self._first_at:
                self._first_at = at
            elif isinstance(event, Finished):
                self._open -= 1
                if not self._open:
                    self._said.set()


def submit(number: int, tokens: int) -> Request:
    prompt = tuple((number * 7919 + place * 104_729) % 100_000 for place in range(PROMPT_TOKENS))
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return Request(request_id=RequestId(f"r{number}"), prompt=prompt, sampling=sampling, arrived_at=0.0)


@contextmanager
def benches(step_s: float) -> Iterator[dict[str, Bench]]:
    with ExitStack() as stack:
        found = {}
        for name, new_engine in ENGINES.items():
            found[name] = Bench(new_engine, step_s)
            stack.callback(found[name].stop)
        yield found


def measure_first_tokens(rounds: int) -> dict[str, Any]:
    """Requests one after the other, by turns at the one engine and the other; a round has a median of each."""
    medians: list[dict[str, float]] = []
    with benches(0.0) as both:
        for _ in range(rounds):
            taken: dict[str, list[float]] = {name: [] for name in both}
            for _ in range(WARM_UP + FIRST_TOKENS):
                for name, bench in both.items():
                    taken[name].append(bench.first_token_s())
            medians.append({name: statistics.median(times[WARM_UP:]) * 1e3 for name, times in taken.items()})
    added = [one["remote"] - one["local"] for one in medians]
    return {**_medians(medians), "added_ms": round(statistics.median(added), 3), "most_added_ms": round(max(added), 3)}


def measure_steps(rounds: int) -> dict[str, Any]:
    """What a step's events cost the front without HTTP and text: the wire, the decoding, the promises."""
    with benches(0.002) as both:
        return {
            f"{rows} rows": _compared(
                [{name: bench.cpu_s(rows) * 1e6 for name, bench in both.items()} for _ in range(rounds)]
            )
            for rows in ROWS
        }


def measure_front(rounds: int) -> dict[str, Any]:
    """What a token costs the server's process as `rota serve` builds it; a round streams from one, then the other."""
    ticks = TickReader(Tokenizer(model_folder()), STEP_S)
    with ExitStack() as stack:
        both = {name: stack.enter_context(_serving(name)) for name in ENGINES}

        def round_of(streams: int) -> dict[str, float]:
            return {name: _front_us(served, ticks, streams) for name, served in both.items()}

        round_of(STREAMS[0])  # in the first round the servers import what they need
        return {f"{streams} streams": _compared([round_of(streams) for _ in range(rounds)]) for streams in STREAMS}


def _compared(rounds: list[dict[str, float]]) -> dict[str, float]:
    ratios = sorted(one["remote"] / one["local"] for one in rounds)
    found = {"remote_by_local": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    return _medians(rounds) | {name: round(value, 3) for name, value in found.items()}


def _front_us(served: Served, ticks: TickReader, streams: int) -> float:
    before = served.cpu_s()["server"]
    windows = asyncio.run(token_ages(served, ticks, streams, ANSWER_TOKENS, STREAMING_S, STREAMING_S / 2))
    return (served.cpu_s()["server"] - before) / sum(len(window.ages) for window in windows) * 1e6


def _serving(name: str) -> AbstractContextManager[Served]:
    return started([sys.executable, __file__, "--serve", name])


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in ENGINES}


def serve_with(name: str) -> None:
    made = []

    def new_engine(*arguments: Any) -> Any:
        made.append(name)
        return ENGINES[name](*arguments)

    rota.commands.engines.SupervisedService = partial(SupervisedService, new_engine=new_engine)  # type: ignore
    serve(STEP_S)
    if not made:
        raise RuntimeError("the server made its engine in another way, so the figures are not of what they say")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_with(options.serve)
    found = {
        "command": f"python benchmarks/remote_engine.py --rounds {options.rounds}",
        "load_before": os.getloadavg()[0],
        "asked": ASKED,
        "first_token_ms": measure_first_tokens(options.rounds),
        "front_cpu_us_per_token": measure_front(options.rounds),
        "front_cpu_us_per_step_without_http": measure_steps(options.rounds),
        "load_after": os.getloadavg()[0],
    }
    print(json.dumps(found, indent=1))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
