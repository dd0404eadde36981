"""Measures how long an adapter's copy into a slot takes on a device that does nothing else.

    python benchmarks/adapter_copy.py [--ranks 16 64] [--repeats 20] [--output FILE] [--shape tiny]

A bank of Llama-8B's shape and no model; random adapters are read from PEFT folders into pinned memory, as the loader
does it, and copied on a stream of their own. "device" is the time between two events around the copy, "wall" that from
the order until the thread that gave it wakes up.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from h200.assets import make_adapter, make_model
from h200.report import number, table
from h200.shapes import SHAPES, Shape

from rota.core.adapter import Adapter
from rota.core.config import ModelConfig
from rota.core.ids import AdapterId, Slot
from rota.engine.device import choose_device
from rota.engine.families.table import read_spec
from rota.engine.lora.bank import Bank
from rota.engine.lora.host import HostAdapter
from rota.engine.lora.loader import checkpoint_reader

SLOTS = 3
SETTLING = SLOTS  # copies before the first that counts: each slot has been written once


class Copier:
    """Copies as the loader does: on a stream of its own, asleep until the copy is complete."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._stream: torch.cuda.Stream | None = None
        if bank.device.type == "cuda":
            self._stream = torch.cuda.Stream(bank.device)
            self._stream.wait_stream(torch.cuda.current_stream(bank.device))

    def copy(self, slot: Slot, adapter: HostAdapter) -> tuple[float | None, float]:
        """Seconds on the device, which only a GPU tells, and by the clock on the wall."""
        if self._stream is None:
            begun_at = time.perf_counter()
            self._bank.copy_in(slot, adapter)
            return None, time.perf_counter() - begun_at
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        torch.cuda.synchronize(self._bank.device)
        begun_at = time.perf_counter()
        with torch.cuda.stream(self._stream):
            begin.record()
            self._bank.copy_in(slot, adapter)
            end.record()
        end.synchronize()
        wall_s = time.perf_counter() - begun_at
        return begin.elapsed_time(end) / 1e3, wall_s


def measure(bank: Bank, adapter: HostAdapter, rank: int, repeats: int) -> dict[str, Any]:
    copier = Copier(bank)
    times = [copier.copy(Slot(count % SLOTS), adapter) for count in range(SETTLING + repeats)][SETTLING:]
    on_device = [device_s for device_s, _ in times if device_s is not None]
    return {
        "rank": rank,
        "size_mb": round(adapter.size_bytes / 1e6, 3),
        "device": told(on_device, adapter.size_bytes) if on_device else None,
        "wall": told([wall_s for _, wall_s in times], adapter.size_bytes),
    }


def told(seconds: Sequence[float], size_bytes: int) -> dict[str, float]:
    """The rate is the median's."""
    median_s = statistics.median(seconds)
    return {
        "median_ms": round(median_s * 1e3, 4),
        "max_ms": round(max(seconds) * 1e3, 4),
        "gb_per_s": round(size_bytes / median_s / 1e9, 3),
    }


def measure_all(folder: Path, shape: Shape, ranks: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """The smallest rank first: nobody finds a larger one in its slot, whose rest would have to be cleared."""
    device = choose_device(ModelConfig())
    model = make_model(folder / "model", shape.config)
    spec = read_spec(model)
    bank = Bank(spec, SLOTS, max(ranks), spec.dtype, device)
    read = checkpoint_reader(bank, spec)
    results = []
    for rank in sorted(set(ranks)):
        path = folder / f"rank{rank}"
        make_adapter(path, model, rank, device.type)
        results.append(
            measure(bank, read(Adapter(adapter_id=AdapterId(rank), name=path.name, path=str(path))), rank, repeats)
        )
        print(f"rank {rank}: {results[-1]}", flush=True)
    return results


def report(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for one in results:
        for clock in ("device", "wall"):
            figures = one[clock] or {}
            cells = [number(figures.get(name)) for name in ("median_ms", "max_ms", "gb_per_s")]
            rows.append([str(one["rank"]), number(one["size_mb"]), clock, *cells])
    return "\n".join(table(("rank", "MB", "clock", "median, ms", "max, ms", "GB/s"), rows))


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64], help="the bank holds up to the largest")
    parser.add_argument("--repeats", type=int, default=20, help="copies of each adapter that count")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args(words)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
    has_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure_all(Path(scratch), SHAPES[given.shape], given.ranks, given.repeats)
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
            "repeats": given.repeats,
        }
        given.output.write_text(json.dumps({**facts, "adapters": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
