"""Measures on a GPU what it saves if an operation adds the adapters' part itself, or rounds for the next product.

    python benchmarks/open_sites.py [--rows 1 16 64 128 384] [--batches NAME …] [--output FILE]

Eight layers of Llama-8B's shape are one graph, with attention over 64 tokens a row: products, adapters and operations
follow each other as in a step, and L2 holds no matrix of the next layer. The ways below compute the same step on the
same weights, and take turns. A figure is the median of a layer, and what 32 layers save against today's kernels.
Adapters have rank 16 and lie below the matrices, in eight-bit floats beside them. Every way's hidden states are
compared with today's first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from h200.assets import make_model as make_folder
from h200.shapes import LLAMA_8B
from torch import Tensor

from rota.engine.attention.triton_attention import TritonAttention
from rota.engine.families.decoder import Decoder, Kernels
from rota.engine.families.table import make_model, read_spec
from rota.engine.layer_cache import LayerCache
from rota.engine.lora.bank import Bank
from rota.engine.lora.batch import make_batch
from rota.engine.lora.deferred import DeferredLora, Output
from rota.engine.lora.layout import fused_rows
from rota.engine.lora.triton_ops import expand, shrink, split_widened, tuning_for
from rota.engine.model.linear import Projection
from rota.engine.model.sites import SITES
from rota.engine.model.spec import ModelSpec
from rota.engine.ops import fused
from rota.engine.ops.fused import SHAPES, FusedOperations, Shapes
from rota.engine.step.device_step import DeviceStep, LoraBatch, int32
from rota.engine.weights.load import dummy_weights
from rota.engine.weights.makers import EightBitFloats

SCRIPT = "benchmarks/open_sites.py"
LAYERS, ALL_LAYERS = 8, 32
RANK, CONTEXT, BLOCK_SIZE = 16, 64, 16
MOST = 512
ROUNDS = 15
# Eight layers in bfloat16: the ways round at other places.
BOUND = 0.04
TODAY = "today"

# Times of all ways, in milliseconds, in turns.
Clock = Callable[[Mapping[str, Callable[[], Tensor]]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Way:
    """Which sites stay open, the shapes of the kernels behind them, and whether norms and silu round."""

    sites: tuple[str, ...] = ()
    shapes: Shapes = field(default_factory=Shapes)
    rounds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A bank of so many slots, so many of them in use, and perhaps a share of the base model."""

    slots: int
    adapters: int
    with_base: bool = False
    in_eight_bits: bool = False  # the weights

    def dealt(self, rows: int) -> list[int] | None:
        """The slot of each row; every second row is the base model's where it has a share; None: all are."""
        if self.adapters == 0:
            return None
        return [self.slots if self.with_base and row % 2 else row % self.adapters for row in range(rows)]

    @property
    def ways(self) -> Mapping[str, Way]:
        """Without adapters no site is open, and rows are rounded for products in eight bits alone."""
        if self.in_eight_bits:
            return {TODAY: Way(), "rounded": Way(rounds=True)}
        return WAYS if self.adapters else {TODAY: WAYS[TODAY]}


WAYS = {
    TODAY: Way(),
    "gate_up": Way(("gate_up",)),
    "gate_up, 64 columns": Way(("gate_up",), replace(SHAPES, silu_columns=64)),
    "gate_up, 3 stages": Way(("gate_up",), replace(SHAPES, stages=3)),
    "gate_up, 256 columns, 8 warps": Way(("gate_up",), replace(SHAPES, silu_columns=256, silu_warps=8)),
    "o and down": Way(("o", "down")),
    "o and down, 4 ranks": Way(("o", "down"), replace(SHAPES, norm_ranks=4)),
    "o and down, 16 ranks": Way(("o", "down"), replace(SHAPES, norm_ranks=16)),
    "o and down, 16 columns a thread": Way(("o", "down"), replace(SHAPES, norm_columns=16)),
    "qkv": Way(("qkv",)),
    "qkv, 2 warps": Way(("qkv",), replace(SHAPES, head_warps=2)),
    "gate_up and qkv": Way(("gate_up", "qkv")),
    "all": Way(SITES),
}
BATCHES = {
    "base": Batch(slots=8, adapters=0),
    "6 adapters": Batch(slots=8, adapters=6),
    "6 and base": Batch(slots=8, adapters=6, with_base=True),
    "16 adapters": Batch(slots=18, adapters=16),
    "base, fp8": Batch(slots=8, adapters=0, in_eight_bits=True),
    "6 adapters, fp8": Batch(slots=8, adapters=6, in_eight_bits=True),
}


class ShapedOperations(FusedOperations):
    """A way's operations: in its shapes where a product is open."""

    def __init__(self, way: Way) -> None:
        super().__init__(way.rounds)
        self._shapes = way.shapes

    def add_rms_norm(self, x: Output, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        if isinstance(x, DeferredLora):
            return fused.add_rms_norm_open(x, residual, weight, epsilon, self._shapes)
        return super().add_rms_norm(x, residual, weight, epsilon)

    def silu_multiply(self, gate_up: Output) -> Tensor:
        if isinstance(gate_up, DeferredLora):
            return fused.silu_multiply_open(gate_up, self._shapes)
        return super().silu_multiply(gate_up)

    def rotate_and_store(
        self,
        qkv: Output,
        rotary: Tensor,
        step: DeviceStep,
        cache: LayerCache,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        if isinstance(qkv, DeferredLora):
            return fused.rotate_and_store_open(qkv, rotary, step, cache, norms, self._shapes)
        return super().rotate_and_store(qkv, rotary, step, cache, norms)


class Layers:
    """Weights, a full bank and a cache, on which every way computes."""

    def __init__(self, spec: ModelSpec, batch: Batch, rows: int, dtype: torch.dtype, device: str) -> None:
        self.spec, self.slots, self.device = spec, batch.slots, torch.device(device)
        fused = fused_rows(spec, () if batch.in_eight_bits else SITES, batch.slots, RANK)
        maker = EightBitFloats() if batch.in_eight_bits else None
        self._weights = dummy_weights(spec, self.device, dtype, fused=fused, maker=maker)
        bank = Bank(spec, batch.slots, RANK, dtype, self.device, self._weights.fused_lora_a)
        self._factors = [{site: bank.factors(layer, site) for site in SITES} for layer in range(spec.layers)]
        for factors in (one for sites in self._factors for one in sites.values()):
            factors.a.normal_(0.0, factors.shape.inputs**-0.5)
            factors.b.normal_(0.0, 0.3 * RANK**-0.5)
            factors.ranks.fill_(RANK)
        shape = (rows * CONTEXT // BLOCK_SIZE + 1, spec.kv_heads, BLOCK_SIZE, spec.head_dim)
        self.cache = [
            LayerCache(*(torch.randn(shape, device=device).to(dtype) for _ in range(2))) for _ in range(spec.layers)
        ]

    def model(self, way: Way) -> Decoder:
        attention, sites = TritonAttention(self.spec.attention_scale), dict.fromkeys(way.sites, MOST)
        kernels = Kernels(ShapedOperations(way), attention, self._project, open_sites=sites)
        return make_model(self.spec, self._weights, kernels)

    def _project(self, projection: Projection, x: Tensor, layer: int, site: str, batch: LoraBatch) -> Output:
        factors, tuning = self._factors[layer][site], tuning_for(batch)
        if projection.widened is not None:
            y, shrunk = split_widened(projection.widened(x), factors)
        else:
            y, shrunk = projection(x), shrink(x, factors, batch, tuning)

        def add(*arguments: Any) -> None:
            expand(*arguments, tuning=tuning)

        return DeferredLora(y=y, shrunk=shrunk, factors=factors, batch=batch, add=add)

    def step(self, token_slots: Sequence[int] | None, rows: int) -> DeviceStep:
        """Rows dealt round to slots; None: the base model's."""
        pages, device = CONTEXT // BLOCK_SIZE, self.device
        tables = torch.arange((rows + 1) * pages, dtype=torch.int32, device=device).view(rows + 1, pages)
        last = torch.full((rows,), CONTEXT - 1, dtype=torch.int64, device=device)
        lora = None
        if token_slots is not None:
            lora = make_batch(np.array(token_slots, np.int32), self.slots, device)
        return DeviceStep(
            token_ids=torch.arange(rows, device=device) % self.spec.vocab_size,
            positions=last,
            addresses=(torch.arange(rows, device=device) + 1) * CONTEXT - 1,
            tables=tables,
            decode_rows=int32(list(range(rows)), device),
            decode_lengths=int32([CONTEXT] * rows, device),
            lora=lora,
        )


def graph_times(calls: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """The median of some replays of each call's graph; calls take turns, so that a clock that drifts favours none."""
    graphs = {}
    for name, call in calls.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        marks = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
        for name, (begin, end) in marks.items():
            begin.record()
            graphs[name].replay()
            end.record()
        torch.cuda.synchronize()
        for name, (begin, end) in marks.items():
            if turn >= 2:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(some) for name, some in times.items()}


def measure(
    layers: Layers, ways: Mapping[str, Way], rows: int, token_slots: Sequence[int] | None, clock: Clock
) -> list[dict[str, Any]]:
    """A figure for each way of one batch."""
    calls, failed, errors, first = {}, {}, {}, None
    for name, way in ways.items():
        try:
            model = layers.model(way)
            found = model.forward(layers.step(token_slots, rows), layers.cache).float()
        except Exception as reason:  # one way that does not run leaves the others
            failed[name] = f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0][:200]}"
            continue
        first = found if first is None else first
        errors[name] = float((found - first).norm() / first.norm())
        calls[name] = _forward(model, layers.step(token_slots, rows), layers.cache)
    times = clock(calls)
    return [
        {"way": name, "failed": failed[name]} if name in failed
        else _figure(name, times[name], times[TODAY], errors[name], layers.spec.layers)
        for name in ways
    ]  # fmt: skip


def _forward(model: Decoder, step: DeviceStep, cache: list[LayerCache]) -> Callable[[], Tensor]:
    return lambda: model.forward(step, cache)


def _figure(name: str, milliseconds: float, today: float, error: float, layers: int) -> dict[str, Any]:
    return {
        "way": name,
        "layer_us": round(1e3 * milliseconds / layers, 2),
        "saved_us_in_32_layers": round(1e3 * (today - milliseconds) / layers * ALL_LAYERS, 1),
        "error": error,
        "is_right": error < BOUND,
    }


def told(place: str, figure: Mapping[str, Any]) -> None:
    if "failed" in figure:
        print(f"{place:24}{figure['way']:34} does not run: {figure['failed']}", flush=True)
        return
    wrong = "" if figure["is_right"] else "  WRONG"
    print(
        f"{place:24}{figure['way']:34}{figure['layer_us']:9.1f} µs a layer {figure['saved_us_in_32_layers']:8.0f} µs "
        f"saved in 32   error {figure['error']:.4f}{wrong}",
        flush=True,
    )


def run(
    config: Mapping[str, Any],
    rows: Sequence[int],
    batches: Mapping[str, Batch],
    clock: Clock,
    device: str,
    dtype: torch.dtype,
    keep: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """All figures; `keep` gets what there is after each batch."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = read_spec(make_folder(Path(scratch) / "model", dict(config)))
    figures: list[dict[str, Any]] = []
    for name, batch in batches.items():
        layers = Layers(spec, batch, max(rows), dtype, device)
        if device == "cuda":
            layers.model(Way()).tune(rows)
        for count in rows:
            place = f"{count} rows, {name}"
            for figure in measure(layers, batch.ways, count, batch.dealt(count), clock):
                figures.append({"rows": count, "batch": name} | figure)
                told(place, figure)
            keep(figures)
        del layers
    return figures


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128, 384])
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--output", type=Path, help="write everything as JSON here")
    options = parser.parse_args(arguments)
    if not 1 <= min(options.rows) <= max(options.rows) <= MOST:
        parser.error(f"--rows: from 1 to {MOST}")
    return options


@torch.inference_mode()
def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    if not torch.cuda.is_available():
        print(f"{SCRIPT} needs a CUDA machine; tests/engine/ops run the same kernels on a CPU.")
        return 2
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": date.today().isoformat(), "command": shlex.join(["python", SCRIPT, *arguments]),
    }  # fmt: skip
    print(f"{report['machine']}, torch {report['torch']}, triton {report['triton']}\n")

    def keep(figures: list[dict[str, Any]]) -> None:
        if options.output:  # after each batch: a run that is cut short leaves what it has measured
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(report | {"figures": figures}, indent=1))

    config = LLAMA_8B | {"num_hidden_layers": LAYERS, "vocab_size": 1024}
    batches = {name: BATCHES[name] for name in options.batches}
    figures = run(config, options.rows, batches, graph_times, "cuda", torch.bfloat16, keep)
    return 0 if all(figure.get("is_right", False) for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
