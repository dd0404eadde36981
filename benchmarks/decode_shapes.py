"""Compares shapes of decode attention on a CUDA machine, between its neighbours of a step.

    PYTHONPATH=src python benchmarks/decode_shapes.py [--kv-cache-dtype fp8] [--output FILE]

A layer is the rotation, attention, and the product behind it; a figure is its time less that of the other two. Kernels
of a step are chained, so attention by itself takes another time than it adds to a step: two programs of a chain run at
once where one ends, and the second one's are dealt unequally to processors. All shapes of a case take turns on the same
numbers, and their results are compared first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import kernels
import torch
import torch.nn.functional as F
from torch import Tensor

from rota.engine.attention.triton_attention import (
    EIGHT_BIT_DECODES,
    FEW_DECODES,
    FEW_EIGHT_BIT_DECODES,
    DecodeTuning,
    TritonAttention,
)
from rota.engine.layer_cache import LayerCache
from rota.engine.ops.fused import FusedOperations
from rota.engine.step.device_step import DeviceStep

SCRIPT = "benchmarks/decode_shapes.py"
TODAY = "today"
BOUND = 1e-2
LAYERS = 16
CASES: dict[str, list[int]] = {
    "12 x 300": [300] * 12,
    "16 x 600": [600] * 16,
    "16 x 2000": [2000] * 16,
    "32 x 600": [600] * 32,
    "48 x 700": [700] * 48,
    "64 x 600": [600] * 64,
    "64 x 512..1024": [512 + 8 * row for row in range(64)],
    "64 x 2000": [2000] * 64,
    "64 x 100..4000": [round(100 * 40 ** (row / 63)) for row in range(64)],
    "80 x 600": [600] * 80,
    "128 x 600": [600] * 128,
    "63 x 700, 7300": [700] * 63 + [7300],
    "56 x 600, 8 x 7300": [600] * 56 + [7300] * 8,
    "384 x 512..1024": [512 + row * 4 // 3 for row in range(384)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of a layer's attention, and the width of the product behind it."""

    heads: int = kernels.HEADS
    kv_heads: int = kernels.KV_HEADS
    head_dim: int = kernels.HEAD_DIM
    hidden: int = kernels.HIDDEN
    dtype: torch.dtype = torch.bfloat16


def tunings(eight: bool) -> dict[str, DecodeTuning | None]:
    """What is tried; None: whatever the kernels take for so many rows."""
    one, two = (EIGHT_BIT_DECODES, FEW_EIGHT_BIT_DECODES) if eight else (DecodeTuning(), FEW_DECODES)
    return {
        TODAY: None,
        "two warps": two,
        "one warp": one,
        "one warp, fair shares": replace(one, fits=False),
        "one warp, seven programs": replace(one, programs=7),
        "one warp, ten in the grid": replace(one, resident=10),
    }


class Layers:
    """Caches of some layers, whose rows have one page table, and what lies around attention."""

    def __init__(self, lengths: Sequence[int], eight: bool, shape: Heads) -> None:
        device, size = kernels.DEVICE, kernels.BLOCK_SIZE
        pages = sum(-(-length // size) for length in lengths)
        held = pages * size * shape.kv_heads * 2 * (shape.head_dim + 4 if eight else 2 * shape.head_dim)
        self.caches = [
            kernels.cache(pages, shape.kv_heads, size, shape.head_dim, shape.dtype, eight)
            for _ in range(max(2, min(LAYERS, 1 + kernels.TOUCHED // held)))
        ]
        self.floor_us = held / kernels.BANDWIDTH * 1e6
        self.step = kernels.step(
            kernels.page_tables(list(lengths), size, torch.randperm(pages).tolist()), list(lengths)
        )
        self._shape, self._rows = shape, len(lengths)
        self._qkv = self._drawn(self._rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        self._matrices = [self._drawn(shape.hidden, shape.heads * shape.head_dim) for _ in range(4)]
        self._rotary = torch.randn(max(lengths), shape.head_dim, device=device)
        self._where = self._last_tokens(lengths)

    def _drawn(self, *size: int) -> Tensor:
        return torch.randn(*size, device=kernels.DEVICE).to(self._shape.dtype)

    def _last_tokens(self, lengths: Sequence[int]) -> DeviceStep:
        """Where each row's newest token stands."""
        last = [length - 1 for length in lengths]
        tables, size = self.step.tables.tolist(), kernels.BLOCK_SIZE
        slots = [tables[row][at // size] * size + at % size for row, at in enumerate(last)]
        return kernels.token_step(*(torch.tensor(numbers, device=kernels.DEVICE) for numbers in (last, slots)))

    def forward(self, attention: TritonAttention | None, layer: int) -> Tensor:
        cache: LayerCache = self.caches[layer % len(self.caches)]
        query = FusedOperations().rotate_and_store(self._qkv, self._rotary, self._where, cache, None)
        if attention is not None:
            query = attention.decode(query, cache, self.step)
        return F.linear(query.reshape(self._rows, -1), self._matrices[layer % len(self._matrices)])

    def calls(self, attention: TritonAttention | None) -> list[Callable[[], Any]]:
        return [partial(self.forward, attention, layer) for layer in range(LAYERS)]


Clock = Callable[[list[Callable[[], Any]]], float]


def measure(
    lengths: Sequence[int], eight: bool, shape: Heads, tried: Mapping[str, DecodeTuning | None], clock: Clock
) -> dict[str, Any]:
    """Microseconds that attention adds to a layer, by shape; a shape whose result is another is told so."""
    layers = Layers(lengths, eight, shape)
    scale = shape.head_dim**-0.5
    expected = layers.forward(TritonAttention(scale), 0)
    without = clock(layers.calls(None))
    told: dict[str, Any] = {"floor_us": layers.floor_us}
    for name, tuning in tried.items():
        attention = TritonAttention(scale, tuning)
        error = kernels.relative_error(layers.forward(attention, 0), expected)
        told[name] = clock(layers.calls(attention)) - without if error < BOUND else f"wrong by {error:.1e}"
    return told


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="what keys and values are in")
    parser.add_argument("--output", type=Path, help="write everything as JSON here")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"{SCRIPT} needs a CUDA machine; tests/engine/attention run the same kernels on a CPU.")
        return 2
    torch.manual_seed(0)
    eight = options.kv_cache_dtype == "fp8"
    tried = tunings(eight)
    print(f"{'us a layer':20}{'floor':>8}" + "".join(f"{name:>26}" for name in tried))
    found = {}
    for case, lengths in CASES.items():
        found[case] = told = measure(lengths, eight, Heads(), tried, kernels.microseconds)
        figures = (f"{one:26.1f}" if isinstance(one, float) else f"{one:>26}" for one in (told[name] for name in tried))
        print(f"{case:20}{told['floor_us']:8.1f}" + "".join(figures), flush=True)
    if options.output:
        facts = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()}
        facts |= {"command": shlex.join([SCRIPT, *arguments]), "kv_cache_dtype": options.kv_cache_dtype}
        options.output.write_text(json.dumps({**facts, "cases": found}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
