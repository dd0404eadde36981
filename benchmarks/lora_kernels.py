"""Measures what adapters add to a step on a GPU: Llama-8B's projections, every layer with weights of its own.

python benchmarks/lora_kernels.py [--sweep [CASE …]] [--output FILE]

All launches of a step are one CUDA graph, so that only the device is measured. Results are checked first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from rota.engine.lora.batch import DECODE_TILE, PREFILL_TILE, make_batch
from rota.engine.lora.files.ranks import PAGE_RANK, pages_for
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.triton_ops import DECODE, PREFILL, LoraTuning, add_lora, shrink
from rota.engine.model.sites import SiteShape
from rota.engine.step.device_step import LoraBatch

LAYERS = 32
SHAPES = (
    SiteShape("qkv", 4096, (("q_proj", 4096), ("k_proj", 1024), ("v_proj", 1024))),
    SiteShape("o", 4096, (("o_proj", 4096),)),
    SiteShape("gate_up", 4096, (("gate_proj", 14336), ("up_proj", 14336))),
    SiteShape("down", 14336, (("down_proj", 4096),)),
)
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
# Sums of 32 layers rounded to bfloat16 after each: a few times its 0.4 %.
BOUND = 2e-2

CHOICES = {
    ("shrink", "rows"): (16, 32, 64, 128),
    ("shrink", "share"): (256, 512, 1024, 2048),
    ("shrink", "most_shares"): (2, 4, 8, 16, 32),
    ("shrink", "step"): (64, 128, 256),
    ("shrink", "warps"): (2, 4, 8),
    ("shrink", "stages"): (2, 3, 4, 6),
    ("expand", "columns"): (64, 128, 256, 512),
    ("expand", "ranks"): (16, 32, 64),
    ("expand", "warps"): (2, 4, 8),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step: so many tokens, dealt round to adapters of these ranks, and a prompt of the first one's."""

    name: str
    tokens: int
    ranks: tuple[int, ...]
    max_rank: int
    tuning: LoraTuning
    tile_size: int
    prompt: int = 0
    has_pages: bool = False  # slots share pages, and each takes those of its rank


@dataclass(frozen=True, slots=True)
class Site:
    """A projection of every layer, what goes in and what comes out."""

    x: Tensor
    y: Tensor
    weights: list[Tensor]
    factors: list[SiteFactors]


CASES = (
    Case("1 token, 1 × 16", 1, (16,), 16, DECODE, DECODE_TILE),
    Case("64 tokens, 1 × 16", 64, (16,), 16, DECODE, DECODE_TILE),
    Case("64 tokens, 6 × 16", 64, (16,) * 6, 16, DECODE, DECODE_TILE),
    Case("64 tokens, 6 × 16 of 64", 64, (16,) * 6, 64, DECODE, DECODE_TILE),
    Case("64 tokens, 32 × 8–64", 64, (8, 16, 32, 64) * 8, 64, DECODE, DECODE_TILE),
    Case("64 tokens, 6 × 16, pages", 64, (16,) * 6, 64, DECODE, DECODE_TILE, has_pages=True),
    Case("64 tokens, 32 × 8–64, pages", 64, (8, 16, 32, 64) * 8, 64, DECODE, DECODE_TILE, has_pages=True),
    Case("64 and 128, 6 × 16 of 64", 192, (16,) * 6, 64, DECODE, DECODE_TILE, prompt=128),
    Case("64 and 256, 6 × 16 of 64", 320, (16,) * 6, 64, PREFILL, PREFILL_TILE, prompt=256),
    Case("64 and 256, 6 × 16 of 64, small tiles", 320, (16,) * 6, 64, DECODE, DECODE_TILE, prompt=256),
    Case("64 and 256, 6 × 16 of 64, middling tiles", 320, (16,) * 6, 64, PREFILL, 32, prompt=256),
    Case("64 and 768, 6 × 16 of 64", 832, (16,) * 6, 64, PREFILL, PREFILL_TILE, prompt=768),
    Case("4096 tokens, 6 × 16", 4096, (16,) * 6, 16, PREFILL, PREFILL_TILE),
    Case("4096 tokens, 6 × 16 of 64", 4096, (16,) * 6, 64, PREFILL, PREFILL_TILE),
    Case("4096 tokens, 6 × 16, pages", 4096, (16,) * 6, 64, PREFILL, PREFILL_TILE, has_pages=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sweep", nargs="*", metavar="CASE", help="try other shapes of the kernels, for all cases or these"
    )
    parser.add_argument("--output", help="write the numbers as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    wrong = [case.name for case in CASES if not report_check(case)]
    if wrong:
        sys.exit(f"wrong results: {', '.join(wrong)}")
    results: dict[str, object] = {case.name: report_times(case) for case in CASES}
    if options.sweep is not None:
        chosen = [case for case in CASES if not options.sweep or case.name in options.sweep]
        results["sweep"] = {case.name: sweep(case) for case in chosen}
    if options.output:
        with open(options.output, "w") as file:
            json.dump(results, file, indent=2)


def report_check(case: Case) -> bool:
    error = relative_error(case, case.tuning)
    print(f"check  {case.name:28} relative error {error:.1e}")
    return error < BOUND


def relative_error(case: Case, tuning: LoraTuning) -> float:
    """The worst of the four sites after a whole captured step, each launch right behind the other."""
    sites, batch = make_sites(case), make_case_batch(case)
    step = functools.partial(apply_all, sites, batch, tuning)
    step()
    graph = capture(step)
    before = [site.y.normal_().clone() for site in sites]
    graph.replay()
    errors = []
    for site, y in zip(sites, before, strict=True):
        expected = y.float()
        for factors in site.factors:
            add_slowly(expected, site.x, factors, batch)
        errors.append(float((site.y.float() - expected).norm() / expected.norm()))
    return max(errors, key=lambda error: error if error == error else float("inf"))


def add_slowly(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> None:
    """Plain float32, slot after slot and part after part."""
    for slot, first, end in batch.groups:
        tokens, rank = batch.order[first:end].long(), int(factors.ranks[slot])
        a, b = (factor.float() for factor in factors.of_slot(slot, rank))
        parts = zip(a.split(rank), b.split(factors.shape.widths, dim=1), strict=True)
        added = [x[tokens].float() @ part_a.T @ part_b for part_a, part_b in parts]
        y[tokens] += torch.cat(added, dim=1)


def report_times(case: Case) -> dict[str, float]:
    """Milliseconds of a step: adapters alone, the products alone, both; and where the time goes."""
    sites, batch, tuning = make_sites(case), make_case_batch(case), case.tuning
    times = {
        "shrink": milliseconds(lambda: shrink_all(sites, batch, tuning)),
        "alone": milliseconds(lambda: apply_all(sites, batch, tuning)),
        "products": milliseconds(lambda: multiply_all(sites)),
        "together": milliseconds(lambda: multiply_all(sites, batch, tuning)),
    }
    added = times["together"] - times["products"]
    times |= {site.factors[0].shape.name: milliseconds(lambda s=site: apply_all([s], batch, tuning)) for site in sites}
    print(
        f"time   {case.name:28} adds {added:6.3f} ms to {times['products']:7.3f} ({added / times['products']:5.1%})"
        f"   alone {times['alone']:6.3f} = {times['alone'] / (2 * LAYERS * len(SHAPES)) * 1e3:5.2f} µs a launch,"
        f" shrink only {times['shrink']:6.3f}   "
        + "  ".join(f"{shape.name} {times[shape.name]:.3f}" for shape in SHAPES)
    )
    return {name: round(value, 4) for name, value in ({"added": added} | times).items()}


def sweep(case: Case) -> dict[str, float | str]:
    """Change one number at a time and keep what is quicker by more than chance."""
    sites, batch = make_sites(case), make_case_batch(case)
    best, tuning = milliseconds(lambda: apply_all(sites, batch, case.tuning)), case.tuning
    tried: dict[str, float | str] = {"as it is": best}
    for path, other in variants(case.tuning):
        candidate = changed(tuning, path, other)
        if candidate == tuning:
            continue
        name = f"{' '.join(path)} {other}"
        try:
            error = relative_error(case, candidate)
            taken = milliseconds(lambda c=candidate: apply_all(sites, batch, c))
        except Exception as reason:  # a shape that does not fit the device says so in many ways
            tried[name] = str(reason).strip().splitlines()[0][:60] if str(reason).strip() else type(reason).__name__
            continue
        tried[name] = taken if error < BOUND else f"wrong by {error:.1e}"
        if error < BOUND and taken < 0.985 * best:
            best, tuning = taken, candidate
    print(f"\nsweep  {case.name}")
    for name, outcome in tried.items():
        print(f"    {name:24} {outcome if isinstance(outcome, str) else f'{outcome:7.3f} ms'}")
    print(f"    best {best:7.3f} ms  {tuning}")
    return tried | {"best": str(tuning)}


def variants(tuning: LoraTuning) -> Iterator[tuple[tuple[str, str], int]]:
    for path, choices in CHOICES.items():
        current = functools.reduce(getattr, path, tuning)
        yield from ((path, other) for other in choices if other != current)


def changed(tuning: LoraTuning, path: tuple[str, str], value: int) -> LoraTuning:
    part, field = path
    return dataclasses.replace(tuning, **{part: dataclasses.replace(getattr(tuning, part), **{field: value})})


def apply_all(sites: list[Site], batch: LoraBatch, tuning: LoraTuning) -> None:
    for layer in range(LAYERS):
        for site in sites:
            add_lora(site.y, site.x, site.factors[layer], batch, tuning)


def shrink_all(sites: list[Site], batch: LoraBatch, tuning: LoraTuning) -> None:
    for layer in range(LAYERS):
        for site in sites:
            shrink(site.x, site.factors[layer], batch, tuning)


def multiply_all(sites: list[Site], batch: LoraBatch | None = None, tuning: LoraTuning = DECODE) -> None:
    """The model's own products and, with a batch, what adapters add to each."""
    for layer in range(LAYERS):
        for site in sites:
            torch.mm(site.x, site.weights[layer].T, out=site.y)
            if batch is not None:
                add_lora(site.y, site.x, site.factors[layer], batch, tuning)


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        body()
    return graph


def milliseconds(body: Callable[[], None], repeats: int = 30) -> float:
    """The median of some replays."""
    body()  # compiles
    graph = capture(body)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats + 3)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks[3:])


def make_case_batch(case: Case) -> LoraBatch:
    slots = len(case.ranks)
    token_slots = np.arange(case.tokens, dtype=np.int32) % slots
    token_slots[case.tokens - case.prompt :] = 0
    if case.tile_size == PREFILL_TILE and not case.prompt:
        token_slots.sort()  # prompts: one adapter's tokens after the other's
    return make_batch(token_slots, slots, DEVICE, case.tile_size)


# Drawing sixteen gigabytes of weights anew for every case would take longer than measuring it.
@functools.cache
def make_weights(shape: SiteShape) -> list[Tensor]:
    return [randn(shape.outputs, shape.inputs) * shape.inputs**-0.5 for _ in range(LAYERS)]


@functools.lru_cache(maxsize=1)
def make_sites(case: Case) -> list[Site]:
    sites = []
    for shape in SHAPES:
        x, y = randn(case.tokens, shape.inputs), randn(case.tokens, shape.outputs)
        sites.append(Site(x, y, make_weights(shape), [make_factors(shape, case) for _ in range(LAYERS)]))
    return sites


def make_factors(shape: SiteShape, case: Case) -> SiteFactors:
    table = make_table(case) if case.has_pages else None
    places, place_rank = (len(case.ranks), case.max_rank) if table is None else (int(table.max()) + 1, PAGE_RANK)
    a = randn(places, len(shape.parts) * place_rank, shape.inputs) * shape.inputs**-0.5
    # Of about the size that keeps sums of all layers and ranks near one.
    b = randn(places, place_rank, shape.outputs) * (statistics.mean(case.ranks) * LAYERS) ** -0.5
    return SiteFactors(shape, a, b, torch.tensor(case.ranks, dtype=torch.int32, device=DEVICE), table)


def make_table(case: Case) -> Tensor:
    """Each slot's pages, which lie anywhere."""
    table = torch.zeros(len(case.ranks), pages_for(case.max_rank), dtype=torch.int32)
    pages = torch.randperm(sum(map(pages_for, case.ranks)), dtype=torch.int32)
    for slot, taken in enumerate(pages.split([pages_for(rank) for rank in case.ranks])):
        table[slot, : len(taken)] = taken
    return table.to(DEVICE)


def randn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=DTYPE, device=DEVICE)


if __name__ == "__main__":
    main()
