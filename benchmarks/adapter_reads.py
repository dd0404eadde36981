"""Measures how long an adapter takes from its file to host memory: packed, and put together by the host.

    python benchmarks/adapter_reads.py [--shape llama-8b] [--threads 1 2 8] [--rounds 8] [--output FILE]

Files are in bfloat16 or in float32, of rank 16 and above a model in bfloat16, and lie in the page cache. Host memory is
plain, and used again as torch uses pinned memory again: so no GPU is needed, and a copy of what was put together to
pinned memory is left out. Each figure is the median of some rounds. The processors' milliseconds are those of all
threads.
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
from h200.shapes import RANK, SHAPES
from torch import Tensor

from rota.engine.families.table import read_spec
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.files.workspace import Workspace
from rota.engine.lora.host import HostAdapter
from rota.engine.model.spec import ModelSpec

PRECISIONS = torch.bfloat16, torch.float32
FIGURES = ("milliseconds", "of_processors")


class Pool:
    """Memory that adapters have given back."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        found = next((one for one in self._free if len(one) == size), None)
        if found is None:
            return torch.empty(size, dtype=torch.uint8)
        self._free = [one for one in self._free if one is not found]
        return found

    def give_back(self, adapter: HostAdapter) -> None:
        self._free += adapter.pieces if adapter.packing else ()


def measure(folder: Path, spec: ModelSpec, packs: bool, threads: int, rounds: int) -> dict[str, Any]:
    """The first round finds out where factors lie, and does not count."""
    pool = Pool()
    work = Workspace(threads, packs, lambda adapter, _: adapter, pool.take)
    elapsed, of_processors = list[float](), list[float]()
    for _ in range(rounds + 1):
        begun_at, used = time.perf_counter(), time.process_time()
        adapter = read_checkpoint(folder, spec, torch.bfloat16, RANK, work=work)
        elapsed.append(time.perf_counter() - begun_at)
        of_processors.append(time.process_time() - used)
        assert (adapter.packing is not None) == packs
        pool.give_back(adapter)
    return {
        "way": "packed" if packs else "put together",
        "threads": threads,
        "milliseconds": statistics.median(elapsed[1:]) * 1e3,
        "of_processors": statistics.median(of_processors[1:]) * 1e3,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, help="write JSON here")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as in an engine with a GPU, whose reads have threads of their own
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", SHAPES[asked.shape].config)
        for dtype in PRECISIONS:
            folder = Path(scratch) / str(dtype)
            make_adapter(folder, model, RANK, dtype=dtype)
            for packs in (True, False):
                for threads in asked.threads:
                    one = measure(folder, read_spec(model), packs, threads, asked.rounds)
                    found.append({"precision": str(dtype).removeprefix("torch."), **one})
    heads = ("file", "way", "threads", "ms", "of processors, ms")
    rows = [
        [one["precision"], one["way"], str(one["threads"]), *(number(one[figure]) for figure in FIGURES)]
        for one in found
    ]
    print("\n".join(table(heads, rows)))
    if asked.output:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "benchmarks/adapter_reads.py", *(arguments or sys.argv[1:])])
        facts = {"command": command, "date": date.today().isoformat(), "torch": torch.__version__, "reads": found}
        asked.output.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
