"""Measures what the host does for an adapter's copy: alone, and beside a thread that keeps Python's lock busy.

    python benchmarks/copy_host.py [--ranks 8 16 64] [--repeats 30] [--output FILE]

A bank of Llama-8B's shape in pages and packed adapters on all projections. The driver's call is left out, and so are
the kernels that turn B: what is left is to find out which bytes go where. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import torch
from h200.assets import make_adapter, make_model
from h200.shapes import SHAPES

from rota.core.ids import Slot
from rota.engine.families.table import read_spec
from rota.engine.lora import bank, copies, packing
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.ranks import PAGE_RANK
from rota.engine.lora.files.workspace import Workspace


def measure(ranks: list[int], repeats: int, folder: Path) -> dict[str, dict[str, float]]:
    spec = read_spec(make_model(folder / "model", SHAPES["llama-8b"].config))
    most = max(ranks) // PAGE_RANK
    pages = bank.Bank(
        spec, 2, max(ranks), torch.bfloat16, torch.device("cpu"), pages=most, has_stage=False, unpacks=True
    )
    found = {}
    for rank in ranks:
        make_adapter(folder / f"rank{rank}", folder / "model", rank)
        work = Workspace(threads=2, packs=True, pin=lambda adapter, _: adapter)
        adapter = read_checkpoint(folder / f"rank{rank}", spec, torch.bfloat16, max(ranks), work=work)

        def copy_ms(adapter=adapter, rank=rank) -> float:
            began_at = time.perf_counter()
            pages.copy_in(Slot(1), adapter, range(rank // PAGE_RANK))
            return (time.perf_counter() - began_at) * 1e3

        copy_ms()
        alone = [copy_ms() for _ in range(repeats)]
        with busy_thread():
            beside = [copy_ms() for _ in range(repeats)]
        found[str(rank)] = {
            "alone_ms": round(statistics.median(alone), 3),
            "beside_a_busy_thread_ms": round(statistics.median(beside), 3),
        }
    return found


@contextmanager
def busy_thread() -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(2000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def leave_out_the_device() -> None:
    bank.can_batch = lambda _: True
    copies._driver_call = lambda: lambda *_: 0
    packing._turner = lambda _: lambda *_: None
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    leave_out_the_device()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.ranks, options.repeats, Path(folder))
    for rank, figures in found.items():
        print(f"rank {rank}: " + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    if options.output:
        facts = {
            "command": " ".join(["python", *sys.argv]),
            "date": date.today().isoformat(),
            "machine": platform.machine(),
        }
        options.output.write_text(json.dumps({**facts, "ranks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
