"""Measures whether copies of an adapter to the device make the decode steps longer that run beside them.

    python -m benchmarks.h200.beside_copies [--inputs copy,kernel,nothing] [--steps 240] [--out FILE]

A step is one graph with the products of 64 rows and Llama-8B's matrices, without attention. Beside every twelfth step
a thread brings 84 MB from pinned memory to the device, on a stream of its own as the engine's copier does:

    none             nothing
    one              one copy
    batch            one call of the driver for 340 stretches
    batch overlap    the same, with the flag that prefers an overlap with computation
    singles          340 copies through torch
    batch 8          eight calls of the driver, for a share of the stretches each
    batch 8 waited   the same, and a call waits for the copies of the one before; so does `batch 32 waited`
    sm 4, sm 16      a kernel of so many programs, which reads the pinned memory itself

The inputs of a step come by a copy, by a kernel that reads pinned memory, or not at all. FILE has, for each kind of
inputs and each way: milliseconds of a step by the device's clock; "worst of 12 over median", the slowest of twelve
steps in a row against the median step, in the median over all such twelves; the longest gap between two steps for the
host; and what a copy took, on the device and for the host to queue it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.lora import copies

from .__main__ import say

LAYERS, ROWS, HIDDEN, INNER = 32, 64, 4096, 14336
MATRICES = ((6144, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
INPUT_NUMBERS = 6000
ADAPTER_BYTES, STRETCHES = 84 << 20, 340
# Stretches begin at multiples of this in pinned memory, and have so much between them on the device.
ALIGNED, GAP = 256, 4096
BLOCK = 4096
OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
EVERY = 12
STEPS, WARM_UP_STEPS = 240, 60
# Steps of a run that are not counted, and buffers that take turns.
SETTLING, RING = 20, 4
INPUTS = ("copy", "kernel", "nothing")

Copy = Callable[[], None]


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), PROGRAMS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count, other=0), mask=at < count)


class Step:
    """A decode step without attention, as a graph."""

    def __init__(self, device: torch.device) -> None:
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self._layers = [[random(shape) * 0.01 for shape in MATRICES] for _ in range(LAYERS)]
        self._rows = random((ROWS, HIDDEN))
        self.inputs = torch.zeros(INPUT_NUMBERS, device=device, dtype=torch.int32)
        self._compute()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.outputs = self._compute()

    def _compute(self) -> Tensor:
        hidden = self._rows + self.inputs[:ROWS, None].to(torch.bfloat16) * 0
        for qkv, o, gate_up, down in self._layers:
            attended = (hidden @ qkv.T)[:, :HIDDEN]
            hidden = (attended @ o.T @ gate_up.T)[:, :INNER] @ down.T
        return hidden.float().argmax(-1).int()

    def launch(self, inputs: Tensor, way: str, outputs: Tensor) -> None:
        """`inputs` and `outputs` are pinned."""
        if way == "copy":
            self.inputs.copy_(inputs, non_blocking=True)
        elif way == "kernel":
            copy_kernel[(2,)](inputs, self.inputs, INPUT_NUMBERS, BLOCK=BLOCK, PROGRAMS=2)
        self._graph.replay()
        outputs.copy_(self.outputs, non_blocking=True)


class AdapterBytes:
    """As many bytes as an adapter has, in pinned memory, and their place on the device."""

    def __init__(self, device: torch.device, size: int = ADAPTER_BYTES, count: int = STRETCHES) -> None:
        self.size, self.count = size, count
        self.stretch = size // count // ALIGNED * ALIGNED
        self.source = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.target = torch.empty(size + count * GAP, dtype=torch.uint8, device=device)
        # Known before: only the call of the driver is timed.
        self.sources = self._stretches(self.source, self.stretch)
        self.targets = self._stretches(self.target, self.stretch + GAP)

    def one(self) -> None:
        self.target[: self.size].copy_(self.source, non_blocking=True)

    def singles(self) -> None:
        size = self.stretch
        for number in range(self.count):
            to, out_of = number * (size + GAP), number * size
            self.target[to : to + size].copy_(self.source[out_of : out_of + size], non_blocking=True)

    def batch(self, flags: int = 0, some: slice = slice(None)) -> None:
        """One call of the driver for some of the stretches."""
        with driver_flags(flags):
            copies.copy_stretches(self.targets[some], self.sources[some])

    def pieces(self, calls: int, waits: bool) -> None:
        for some in shares(self.count, calls):
            self.batch(some=some)
            if waits:
                torch.cuda.current_stream().synchronize()

    def by_kernel(self, programs: int) -> None:
        numbers = self.source.view(torch.int32), self.target.view(torch.int32)
        copy_kernel[(programs,)](*numbers, self.size // 4, BLOCK=BLOCK, PROGRAMS=programs, num_warps=8)

    def _stretches(self, memory: Tensor, apart: int) -> copies.StretchTable:
        return np.array([(memory.data_ptr() + number * apart, self.stretch) for number in range(self.count)])


def shares(count: int, calls: int) -> list[slice]:
    """All of `count` in so many parts, of which the last may be shorter."""
    size = -(-count // calls)
    return [slice(first, min(count, first + size)) for first in range(0, count, size)]


@contextmanager
def driver_flags(flags: int) -> Iterator[None]:
    """Batched copies have these flags for a while; the engine gives none."""
    usual = copies._Attributes
    copies._Attributes = partial(usual, flags=flags)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        copies._Attributes = usual  # type: ignore[misc]


def ways_of(adapter: AdapterBytes) -> dict[str, Copy | None]:
    return {
        "none": None,
        "one": adapter.one,
        "batch": adapter.batch,
        "batch overlap": partial(adapter.batch, OVERLAP),
        "singles": adapter.singles,
        "batch 8": partial(adapter.pieces, 8, waits=False),
        "batch 8 waited": partial(adapter.pieces, 8, waits=True),
        "batch 32 waited": partial(adapter.pieces, 32, waits=True),
        "sm 4": partial(adapter.by_kernel, 4),
        "sm 16": partial(adapter.by_kernel, 16),
    }


class Copier:
    """A thread that copies when told to, on a stream of its own. Without a way to copy it does nothing."""

    def __init__(self, copy: Copy | None) -> None:
        self.took_ms: list[float] = []
        self.queued_ms: list[float] = []
        self._copy = copy
        self._is_wanted, self._is_ending = threading.Event(), False
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ending = True
        self._is_wanted.set()
        self._thread.join()

    def begin(self) -> None:
        if self._copy:
            self._is_wanted.set()

    def _work(self) -> None:
        if self._copy is None:
            return
        stream = torch.cuda.Stream()
        while True:
            self._is_wanted.wait()
            self._is_wanted.clear()
            if self._is_ending:
                return
            with torch.cuda.stream(stream):
                self._timed(self._copy)

    def _timed(self, copy: Copy) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        begun_at = time.perf_counter()
        begin.record()
        copy()
        end.record()
        self.queued_ms.append((time.perf_counter() - begun_at) * 1e3)
        end.synchronize()
        self.took_ms.append(begin.elapsed_time(end))


def measure(step: Step, way: str, copy: Copy | None, steps: int) -> dict[str, Any]:
    """Steps whose inputs come by `way`, one queued ahead of the one that is waited for, beside copies."""
    inputs = [torch.zeros(INPUT_NUMBERS, dtype=torch.int32).pin_memory() for _ in range(RING)]
    outputs = [torch.zeros(ROWS, dtype=torch.int32).pin_memory() for _ in range(RING)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps)]
    heard_at = []
    with Copier(copy) as copier:
        for number, end in enumerate(ends):
            step.launch(inputs[number % RING], way, outputs[number % RING])
            end.record()
            if number % EVERY == EVERY // 2:
                copier.begin()
            if number:
                ends[number - 1].synchronize()
            heard_at.append(time.perf_counter())
        torch.cuda.synchronize()
    step_ms = [before.elapsed_time(after) for before, after in pairwise(ends[SETTLING:])]
    gaps_ms = [(after - before) * 1e3 for before, after in pairwise(heard_at[SETTLING:])]
    return told(step_ms, gaps_ms, copier.took_ms, copier.queued_ms)


def told(
    step_ms: Sequence[float], gaps_ms: Sequence[float], took_ms: Sequence[float], queued_ms: Sequence[float]
) -> dict[str, Any]:
    median, ordered = statistics.median(step_ms), sorted(step_ms)
    worst = [max(step_ms[first : first + EVERY]) for first in range(0, len(step_ms) - EVERY, EVERY)]
    return {
        "median": round(median, 3),
        "p95": round(ordered[int(len(ordered) * 0.95)], 3),
        "max": round(ordered[-1], 3),
        f"worst of {EVERY} over median": round(statistics.median(worst) / median, 3),
        "host max gap": round(max(gaps_ms), 2),
        "copy ms": round(statistics.median(took_ms), 2) if took_ms else None,
        "submit ms": round(statistics.median(queued_ms), 2) if queued_ms else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", default=",".join(INPUTS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("h200-beside-copies.json"))
    asked = parser.parse_args(arguments)
    device = torch.device("cuda")
    if not torch.cuda.is_available() or not copies.can_batch(device):
        parser.error("this needs a GPU, with a driver that copies in batches (CUDA 12.8)")
    ways = asked.inputs.split(",")
    if unknown := set(ways) - set(INPUTS):
        parser.error(f"--inputs: {', '.join(sorted(unknown))}; there are {', '.join(INPUTS)}")
    if asked.steps < SETTLING + 2 * EVERY + 2:
        parser.error(f"--steps: {SETTLING + 2 * EVERY + 2} are the fewest that tell something")
    step, adapter, found = Step(device), AdapterBytes(device), dict[str, Any]()
    for way in ways:
        for name, copy in ways_of(adapter).items():
            measure(step, way, copy, WARM_UP_STEPS)  # kernels are compiled, and pages of pinned memory touched
            found[f"{way} / {name}"] = measure(step, way, copy, asked.steps)
            say(f"{way} / {name}: {json.dumps(found[f'{way} / {name}'])}")
    asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
