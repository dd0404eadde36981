"""Measures how long an adapter's copy into a slot takes: on an idle device and beside decode steps.

    python benchmarks/adapter_copy.py [--ranks 16 64] [--stage on off] [--decodes 64] [--repeats 20] [--output FILE]
                                      [--shape tiny] [--pages]

A bank of Llama-8B's shape, with a staging buffer and without it. Random adapters are read from PEFT folders into pinned
memory, as the loader does it, and copied on a stream of their own. "device" is the time between two events around the
copy, "wall" that from the order until the thread that gave it wakes up. "queue" is the part of the wall time until
all copies are given to the driver. A step that waits for a copy waits on the host that long at most. With pages, those
of an adapter never lie beside each other.

Beside steps, an engine of the same shape with random weights decodes rows of the base model, two steps in flight, and a
second thread copies one adapter after the other. The steps' own times stand beside those of the same steps alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from threading import Event
from typing import Any

import torch
from h200.assets import make_adapter, make_model
from h200.report import number, table
from h200.shapes import SHAPES, Shape
from h200.timed import Timed
from mixed_steps import Author, Case, drive, pages_for

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import AdapterId, Row, Slot
from rota.core.plan import StepPlan
from rota.engine.build import build_engine
from rota.engine.device import choose_device
from rota.engine.families.table import read_spec
from rota.engine.lora.bank import Bank
from rota.engine.lora.files.ranks import pages_for as adapter_pages
from rota.engine.lora.host import HostAdapter
from rota.engine.lora.loader import TimedCopy, checkpoint_reader

SLOTS = 3
SETTLING = SLOTS  # copies before the first that counts: each slot has been written once
STAGES = {"on": True, "off": False}
CLOCKS = ("device", "wall", "queue")
CONTEXT = 300  # tokens of a row when a round begins
ROUND, ROUNDS = 32, 4  # steps of a round, and rounds of a measurement


@dataclass(frozen=True, slots=True)
class Copied:
    """The seconds of one copy."""

    device: float | None  # only a GPU tells
    wall: float
    queue: float


class Copier:
    """Copies as the loader does: on a stream of its own, asleep until the copy is complete."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._stream: torch.cuda.Stream | None = None
        if bank.device.type == "cuda":
            self._stream = torch.cuda.Stream(bank.device)
            self._stream.wait_stream(torch.cuda.current_stream(bank.device))

    def copy(self, slot: Slot, adapter: HostAdapter) -> Copied:
        timed = TimedCopy(self._stream)
        begun_at = time.perf_counter()
        with timed:
            self._bank.copy_in(slot, adapter, range(slot, SLOTS * self._bank.pages_of(adapter), SLOTS))
        queue_s = time.perf_counter() - begun_at
        copy_s = timed.wait()
        wall_s = time.perf_counter() - begun_at
        return Copied(copy_s if self._stream is not None else None, wall_s, queue_s)

    def copies(self, adapter: HostAdapter, repeats: int, is_over: Callable[[], bool] = lambda: True) -> list[Copied]:
        """One after the other until it is over, and at least so many."""
        copied: list[Copied] = []
        while len(copied) < SETTLING + repeats or not is_over():
            copied.append(self.copy(Slot(len(copied) % SLOTS), adapter))
        return copied[SETTLING:]


class Decoding:
    """Decode steps of the base model, as many rows in each as asked for."""

    def __init__(self, model: Path, shape: Shape, rows: int) -> None:
        context = max(1, CONTEXT // shape.shorter)
        pages = pages_for(context + ROUND + 2)
        self._author = Author(rows, context, pages, shape.config["vocab_size"])
        self._case = Case(rows, 0, 0)
        self._engine = build_engine(
            EngineConfig(
                model=ModelConfig(model_path=str(model), load_format="dummy"),
                cache=CacheConfig(kv_blocks=rows * pages),
                scheduler=SchedulerConfig(max_running_requests=rows),
                lora=LoraConfig(max_loras_per_batch=1, max_lora_rank=8),
                quiet=True,
            )
        )
        for plan in self._author.contexts(rows):
            self._engine.collect(self._engine.submit(plan))

    def rounds(self, count: int) -> list[float]:
        """The seconds of the steps of so many rounds; the first step of a round does not count."""
        seconds: list[float] = []
        decodes = tuple(Row(row) for row in range(self._case.decodes))
        for _ in range(count):
            self._engine.collect(self._engine.submit(self._author.rewound(self._case)))
            device = Timed(self._engine)
            drive(device, (StepPlan(step_id=step, decodes=decodes) for step in range(ROUND)))
            seconds += [step.seconds for step in device.steps[1:]]
        return seconds

    def close(self) -> None:
        self._engine.close()


def measure(bank: Bank, adapter: HostAdapter, rank: int, repeats: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "size_mb": round(adapter.size_bytes / 1e6, 3),
        **clocks(Copier(bank).copies(adapter, repeats), adapter.size_bytes),
    }


def measure_beside(decoding: Decoding, bank: Bank, adapter: HostAdapter, repeats: int) -> dict[str, Any]:
    """The same copies beside decode steps, and those steps."""
    alone, is_over = decoding.rounds(ROUNDS), Event()
    with ThreadPoolExecutor(1) as thread:
        copies = thread.submit(Copier(bank).copies, adapter, repeats, is_over.is_set)
        try:
            beside = decoding.rounds(ROUNDS)
        finally:
            is_over.set()
    figures = {
        "alone_median": statistics.median(alone),
        "beside_median": statistics.median(beside),
        "alone_max": max(alone),
        "beside_max": max(beside),
    }
    step_ms = {name: round(seconds * 1e3, 4) for name, seconds in figures.items()}
    return {**clocks(copies.result(), adapter.size_bytes), "step_ms": step_ms}


def clocks(copies: Sequence[Copied], size_bytes: int) -> dict[str, dict[str, float] | None]:
    times = {clock: [seconds for one in copies if (seconds := getattr(one, clock)) is not None] for clock in CLOCKS}
    return {clock: told(seconds, size_bytes) if seconds else None for clock, seconds in times.items()}


def told(seconds: Sequence[float], size_bytes: int) -> dict[str, float]:
    """The rate is the median's."""
    median_s = statistics.median(seconds)
    return {
        "median_ms": round(median_s * 1e3, 4),
        "max_ms": round(max(seconds) * 1e3, 4),
        "gb_per_s": round(size_bytes / median_s / 1e9, 3),
    }


def measure_all(
    folder: Path,
    shape: Shape,
    ranks: Sequence[int],
    stages: Sequence[str],
    decodes: int,
    repeats: int,
    has_pages: bool = False,
) -> list[dict[str, Any]]:
    """The smallest rank first: then no adapter finds a larger one in its slot, whose rest would have to be cleared."""
    device = choose_device(ModelConfig())
    model = make_model(folder / "model", shape.config)
    spec = read_spec(model)
    decoding = Decoding(model, shape, decodes) if decodes else None
    pages = SLOTS * adapter_pages(max(ranks)) if has_pages else 0
    banks = {
        stage: Bank(spec, SLOTS, max(ranks), spec.dtype, device, has_stage=STAGES[stage], pages=pages)
        for stage in dict.fromkeys(stages)
    }
    results = []
    for rank in sorted(set(ranks)):
        path = folder / f"rank{rank}"
        make_adapter(path, model, rank, device.type)
        for stage, bank in banks.items():
            read = checkpoint_reader(bank, spec)
            adapter = read(Adapter(adapter_id=AdapterId(rank), name=path.name, path=str(path)))
            beside = measure_beside(decoding, bank, adapter, repeats) if decoding else None
            bank_mb = round(bank.size_bytes / 1e6, 3)
            idle = measure(bank, adapter, rank, repeats)
            results.append({"stage": stage, "bank_mb": bank_mb, **idle, "beside": beside})
            print(f"rank {rank}, stage {stage}: {results[-1]}", flush=True)
    if decoding:
        decoding.close()
    return results


def report(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for one in results:
        for clock in CLOCKS:
            idle, beside = one[clock] or {}, (one["beside"] or {}).get(clock) or {}
            cells = [number(idle.get(name)) for name in ("median_ms", "max_ms", "gb_per_s")]
            cells += [number(beside.get(name)) for name in ("median_ms", "max_ms")]
            rows.append([str(one["rank"]), number(one["size_mb"]), one["stage"], clock, *cells])
    heads = (
        "rank",
        "MB",
        "stage",
        "clock",
        "idle: median, ms",
        "max, ms",
        "GB/s",
        "beside steps: median, ms",
        "max, ms",
    )
    lines = table(heads, rows)
    for one in results:
        if one["beside"]:
            step = one["beside"]["step_ms"]
            lines.append(
                f"rank {one['rank']}, stage {one['stage']}, bank of {number(one['bank_mb'])} MB: steps alone "
                f"{step['alone_median']:.2f} ms (longest {step['alone_max']:.2f}), beside copies "
                f"{step['beside_median']:.2f} ms (longest {step['beside_max']:.2f})"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64], help="the bank holds up to the largest")
    parser.add_argument("--repeats", type=int, default=20, help="copies of each adapter that count")
    parser.add_argument("--stage", choices=STAGES, nargs="+", default=list(STAGES), help="with a staging buffer or not")
    parser.add_argument("--decodes", type=int, default=64, help="rows of the steps beside copies; 0: no steps")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--pages", action="store_true", help="slots share pages of eight ranks")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args(words)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
    has_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure_all(
            Path(scratch), SHAPES[given.shape], given.ranks, given.stage, given.decodes, given.repeats, given.pages
        )
    if not has_gpu:
        print("No GPU here: times on the device are left out, and the memory is not pinned.")
    print(report(results))
    if given.output:
        facts = {
            "machine": f"{torch.cuda.get_device_name() if has_gpu else 'CPU'}, torch {torch.__version__}",
            "date": date.today().isoformat(),
            "command": shlex.join(["python", "benchmarks/adapter_copy.py", *words]),
            "shape": given.shape,
            "max_rank": max(given.ranks),
            "pages": given.pages,
            "repeats": given.repeats,
            "decodes": given.decodes,
        }
        given.output.write_text(json.dumps({**facts, "adapters": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
