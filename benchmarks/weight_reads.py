"""Measures how fast a model's weights are read: from the memory map, and by threads through a ring of buffers.

    python benchmarks/weight_reads.py [--folder MODEL | --shape llama-8b] [--threads 2 4 8 16] [--buffer-mb 16 32 64]
                                      [--buffers-a-thread 2] [--rounds 3] [--cold] [--busy] [--output FILE]

    map       copies from the memory map, one thread
    ring      threads that read the files (`os.preadv`)
    mapped    the same threads, which copy from a memory map into the buffers

    host      into plain memory, without a device: what files and processors give
    device    a whole `load_weights` to the GPU, with allocations and checks; only where there is a GPU

Each figure is the best of some rounds; the processors' seconds are those of all threads. The files lie in the page
cache, for a round that does not count comes first. `--cold` asks the system to drop them before every round. `--busy`
keeps a thread computing in Python meanwhile, as the one that compiles kernels does. Without a folder, random weights of
a shape are written and removed afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from h200.assets import make_model, write_weights
from h200.report import number, table
from h200.shapes import SHAPES
from torch import Tensor

from rota.engine.families.table import read_spec
from rota.engine.parallel.shard import Cut
from rota.engine.weights.load import load_weights
from rota.engine.weights.read_ahead import RingSetup, Wait, WeightRing, no_copier, pinned_on_gpu
from rota.engine.weights.shards import FileRange, Shards, read_places

HEADS = ("to", "way", "threads", "buffer, MB", "seconds", "of processors", "GB/s")
FIGURES = ("buffer_mb", "seconds", "processor_s", "gb_per_s")
Maps = dict[int, mmap.mmap]


@dataclass(frozen=True, slots=True)
class Way:
    """How tensors get out of their files."""

    name: str
    threads: int = 1
    buffer_mb: int | None = None
    buffers: int = 0

    def ring(self) -> RingSetup | None:
        """A new one for every round: the numbers of open files are used again. None: no ring."""
        if self.buffer_mb is None:
            return None
        read = os.preadv if self.name == "ring" else partial(read_mapped, {})
        return RingSetup(threads=self.threads, buffers=self.buffers, buffer_bytes=self.buffer_mb << 20, read=read)


def read_mapped(maps: Maps, file: int, buffers: Sequence[memoryview], start: int) -> int:
    """What `os.preadv` does, from a memory map; numpy copies without Python's lock."""
    if file not in maps:
        maps[file] = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    target = np.frombuffer(buffers[0], dtype=np.uint8)
    np.copyto(target, np.frombuffer(maps[file], np.uint8, len(target), start))
    return len(target)


class Dropping:
    """A copier of plain buffers that copies nothing."""

    def __enter__(self) -> Dropping:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor) -> None:
        pass

    def mark(self) -> Wait:
        return lambda: None


def nowhere(name: str, _target: Tensor, _cut: Cut | None) -> None:
    raise AssertionError(f"{name} was not read by the ring")


def read_to_host(folder: Path, places: Mapping[str, FileRange], way: Way) -> None:
    if (ring := way.ring()) is not None:
        with WeightRing(places, Dropping(), ring, nowhere) as reads:
            for name, place in places.items():
                reads.copy(name, torch.empty(place.numbers, dtype=place.dtype, device="meta"))
        return
    scratch = torch.empty(max(place.end - place.start for place in places.values()), dtype=torch.uint8)
    with Shards(folder) as shards:
        for name, place in places.items():
            target = scratch[: place.end - place.start].view(place.dtype)
            target.copy_(shards.read(name).view(-1))


@torch.inference_mode()
def read_to_device(folder: Path, way: Way) -> None:
    spec, device = read_spec(folder), torch.device("cuda", torch.cuda.current_device())
    assert spec.dtype is not None
    if (ring := way.ring()) is None:
        load_weights(folder, spec, device, spec.dtype, True, copier_for=no_copier)
    else:
        load_weights(folder, spec, device, spec.dtype, True, copier_for=pinned_on_gpu, ring=ring)
    torch.cuda.synchronize()


def best_s(read: Callable[[], None], rounds: int, prepare: Callable[[], None]) -> tuple[float, float]:
    """The seconds of the fastest round, and the fewest of the processors."""
    clocks = (time.perf_counter, time.process_time)
    seconds = []
    for _ in range(rounds):
        prepare()
        begun_at = [clock() for clock in clocks]
        read()
        seconds.append([clock() - at for clock, at in zip(clocks, begun_at, strict=True)])
    wall, processors = zip(*seconds, strict=True)
    return min(wall), min(processors)


def drop(paths: Sequence[Path]) -> None:
    """Ask the system to forget files; pages that someone maps stay."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def busy(is_wanted: bool) -> Iterator[None]:
    """A thread that holds Python's lock as often as it can."""
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    if is_wanted:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if is_wanted:
            thread.join()


def measure_all(folder: Path, ways: Sequence[Way], rounds: int, is_cold: bool) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.safetensors"))
    places = {name: place for path in files for name, place in read_places(path).items()}
    size = sum(place.end - place.start for place in places.values())
    reads: dict[str, Callable[[Way], None]] = {"host": lambda way: read_to_host(folder, places, way)}
    if torch.cuda.is_available():
        reads["device"] = lambda way: read_to_device(folder, way)
    results = []
    for to, read in reads.items():
        read(ways[0])
        for way in ways:
            seconds = best_s(partial(read, way), rounds, partial(drop, files if is_cold else []))
            results.append(told(to, way, *seconds, size))
            print(results[-1], flush=True)
    return results


def told(to: str, way: Way, seconds: float, processor_s: float, size: int) -> dict[str, Any]:
    return {
        "to": to,
        "way": way.name,
        "threads": way.threads,
        "buffer_mb": way.buffer_mb,
        "seconds": round(seconds, 4),
        "processor_s": round(processor_s, 4),
        "gb_per_s": round(size / seconds / 1e9, 3),
    }


def report(results: Sequence[dict[str, Any]]) -> str:
    rows = [[one["to"], one["way"], str(one["threads"]), *(number(one[field]) for field in FIGURES)] for one in results]
    return "\n".join(table(HEADS, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a model with safetensors, in the precision that it is served in")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="of the weights that are written without")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--buffer-mb", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--buffers-a-thread", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each round")
    parser.add_argument("--busy", action="store_true", help="beside a thread that computes in Python")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args(words)
    sizes = itertools.product(("ring", "mapped"), given.threads, given.buffer_mb)
    rings = [Way(name, threads, mb, threads * given.buffers_a_thread) for name, threads, mb in sizes]
    with tempfile.TemporaryDirectory() as scratch, busy(given.busy):
        folder = given.folder or written(Path(scratch) / "model", given.shape)
        results = measure_all(folder, [Way("map"), *rings], given.rounds, given.cold)
    print(report(results))
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps({**facts(words), "reads": results}, indent=2) + "\n")


def written(folder: Path, shape: str) -> Path:
    config = SHAPES[shape].config
    write_weights(make_model(folder, config), config, "cuda" if torch.cuda.is_available() else "cpu")
    return folder


def facts(words: Sequence[str]) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "benchmarks/weight_reads.py", *words]),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
