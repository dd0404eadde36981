"""Measures what a pass pays for the exchange of reports: a board among eight ranks, an all-gather of 2 and 4 processes.

python benchmarks/exchange.py [--output FILE]

Needs nothing beside Rota's own modules, and no device.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.queues import Queue
from pathlib import Path

from rota.policy.prefill_delayer import PrefillDelayer, RankReport
from rota.runtime.replicas.exchange.all_gather import AllGather
from rota.runtime.replicas.exchange.lines import SharedLines
from rota.runtime.replicas.exchange.place import WORDS, Board

PASSES = 4000
ROUNDS = 2000
BOARD_RANKS = 8
GATHERED = (2, 4)
TIMEOUT_S = 60.0

Figures = dict[str, float]


def figures(seconds: Sequence[float]) -> Figures:
    """In microseconds."""
    ordered = sorted(seconds)
    at = {"least": 0.0, "median": 0.5, "p99": 0.99}
    return {name: round(ordered[int(share * (len(ordered) - 1))] * 1e6, 2) for name, share in at.items()}


def report(admissible: int) -> RankReport:
    return RankReport(
        is_prefillable=admissible > 0,
        is_below_watermark=False,
        running=64,
        largest_batch=8,
        admissible=admissible,
        now_ms=int(time.monotonic() * 1000),
    )


def board(folder: Path, admissible: int) -> Figures:
    """One rank's `share`, while all others write a line between two of its passes."""
    path = folder / f"board-{admissible}"
    SharedLines.create(path, BOARD_RANKS, WORDS)
    first, *others = [Board(path, rank) for rank in range(BOARD_RANKS)]
    taken = []
    for _ in range(PASSES):
        for other in others:
            other.share(report(admissible=3))
        own = report(admissible)
        began_at = time.perf_counter()
        first.share(own)
        taken.append(time.perf_counter() - began_at)
    return figures(taken)


def deciding(folder: Path) -> Figures:
    """The whole verdict of a rank with prompts on that board: with `share`, and with the policy's own time."""
    path = folder / "deciding"
    SharedLines.create(path, BOARD_RANKS, WORDS)
    first, *others = [Board(path, rank) for rank in range(BOARD_RANKS)]
    delayer = PrefillDelayer(max_running=256, queue_min_ratio=0.3, exchange=first)
    delayer.note_batch(8)
    taken = []
    for _ in range(PASSES):
        for other in others:
            other.share(report(admissible=3))
        now = time.monotonic()
        began_at = time.perf_counter()
        delayer.decide(running=64, admissible=3, token_usage=0.5, now=now)
        taken.append(time.perf_counter() - began_at)
    return figures(taken)


def gather(folder: str, rank: int, ranks: int, results: Queue[list[float]]) -> None:
    """One rank's rounds, one after the other: between them no rank does anything else."""
    exchange, ends_at = AllGather(Path(folder), rank), time.monotonic() + TIMEOUT_S
    while len(exchange.share(report(admissible=3))) < ranks and time.monotonic() < ends_at:
        time.sleep(0.001)  # between two looks whether all have come
    taken = []
    for _ in range(ROUNDS):
        own = report(admissible=3)
        began_at = time.perf_counter()
        exchange.share(own)
        taken.append(time.perf_counter() - began_at)
    exchange.close()
    results.put(taken)


def all_gather(folder: Path, ranks: int) -> Figures:
    place = folder / f"gather-{ranks}"
    place.mkdir()
    AllGather.create(place, ranks)
    context = multiprocessing.get_context("spawn")
    results: Queue[list[float]] = context.Queue()
    arguments = [(str(place), rank, ranks, results) for rank in range(ranks)]
    processes = [context.Process(target=gather, args=one, daemon=True) for one in arguments]
    for process in processes:
        process.start()
    taken = [seconds for _ in processes for seconds in results.get(timeout=2 * TIMEOUT_S)]
    for process in processes:
        process.join()
    return figures(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    output = parser.parse_args().output
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        found = {
            f"board of {BOARD_RANKS}, a pass without prompts": board(folder, admissible=0),
            f"board of {BOARD_RANKS}, a pass with prompts": board(folder, admissible=3),
            f"board of {BOARD_RANKS}, a verdict on prompts": deciding(folder),
            **{f"all-gather of {ranks} processes": all_gather(folder, ranks) for ranks in GATHERED},
        }
    for what, one in found.items():
        print(f"{what:42}" + "".join(f"  {name} {value:8.2f} µs" for name, value in one.items()))
    load = os.getloadavg()[0]
    spread = statistics.mean(one["p99"] / one["median"] for one in found.values())
    print(f"{os.cpu_count()} cores, load {load:.1f}; P99 is {spread:.1f} × the median, in the mean")
    if output:
        output.write_text(json.dumps({"cores": os.cpu_count(), "load": load, "microseconds": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
