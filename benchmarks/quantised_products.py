"""Measures products by matrices in few bits on a GPU: Llama-8B's four sites, in microseconds beside their floors.

    python benchmarks/quantised_products.py [--sites qkv o gate_up down] [--rows 1 4 16 64 128 384] [--group 128]
                                            [--output FILE]

    bf16               torch's product
    fp8 scaled         x rounded in one launch, then torch's scaled product
    fp8 scaled alone   the same without the rounding: what a norm that rounds would leave
    fp8 kernel         our kernels, the fastest of their shapes: x not rounded up to 16 rows, else rounded in one launch
    int4 kernel        our kernel in four bits, x not rounded
    int4 written out   the matrix written out in 16 bits, then torch's product

A floor is the time that the bytes of matrix, x and y take at the bandwidth measured first. Matrices take turns, so that
L2 does not hold the next one. Each time is the best of some replays of a graph. Results are checked first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from long_rows import bandwidth
from torch import Tensor
from torch.nn import functional

from rota.engine.model.gemm_choice import graph_milliseconds
from rota.engine.quantised.codes import Codes, Scaled
from rota.engine.quantised.packed_product import TRIED_ROWS, PackedProduct, WrittenOutProduct
from rota.engine.quantised.packing import Packed, pack_eight_bits, pack_four_bits, step_of
from rota.engine.quantised.products import in_eight_bit_floats
from rota.engine.quantised.scaled_product import ScaledProduct, round_rows

SCRIPT = "benchmarks/quantised_products.py"
DTYPE = torch.bfloat16
# Four times an H200's L2.
TOUCHED = 200_000_000
# Rounding x to eight bits costs some 3 %, the other ways 0.4 % at most.
BOUNDS = {"fp8 scaled": 0.05, "fp8 scaled alone": 0.05, "fp8 kernel": 0.05}
BOUND = 6e-3

Clock = Callable[[Sequence[Callable[[], object]]], float]
# A way is tried in several shapes, each with a name and a call for every matrix.
Ways = dict[str, dict[str, list[Callable[[], Tensor]]]]


@dataclass(frozen=True, slots=True)
class Site:
    """A matrix of the model."""

    outputs: int
    inputs: int

    def moved(self, way: str, rows: int, group: int) -> float:
        """The bytes that a product reads and writes at least."""
        weights = self.outputs * self.inputs
        matrix = {
            "bf16": 2 * weights, "fp8": weights + 4 * self.outputs, "int4": weights / 2 + 4 * weights / group
        }[way.split()[0]]  # fmt: skip
        return matrix + 2 * rows * (self.inputs + self.outputs)


SITES = {
    "qkv": Site(6144, 4096),
    "o": Site(4096, 4096),
    "gate_up": Site(28672, 4096),
    "down": Site(4096, 14336),
}


def copies_for(size_bytes: int) -> int:
    """So many matrices that L2 has forgotten the first when its turn comes again."""
    return max(2, math.ceil(TOUCHED / size_bytes))


class Matrices:
    """A site's matrix in three forms, several copies of each, and what it multiplies to."""

    def __init__(self, site: Site, group: int, device: str) -> None:
        self.weight = torch.randn(site.outputs, site.inputs, device=device) / site.inputs**0.5
        self.scaled = in_eight_bit_floats(self.weight)
        self.codes = random_codes(site, group, device)
        eight, step = pack_eight_bits(self.scaled), step_of(self.codes)
        assert step is not None, "the groups are equally long"
        four = pack_four_bits(self.codes, step)
        plain = self.weight.to(DTYPE)
        self.plain = [plain.clone() for _ in range(copies_for(plain.nbytes))]
        self.eight = [(PackedProduct(one, ScaledProduct(one)), ScaledProduct(one)) for one in copied(eight)]
        self.four = [PackedProduct(one, WrittenOutProduct(one)) for one in copied(four)]

    def ways(self, x: Tensor) -> Ways:
        rounded = round_rows(x)
        eight = [one for one, _ in self.eight]
        scaled = [partial(one.multiply, rounded, None, DTYPE) for _, one in self.eight]
        found: Ways = {
            "bf16": {"": [partial(functional.linear, x, one) for one in self.plain]},
            "fp8 scaled": {"": [partial(one.computed, x, None, None) for one in eight]},
            "fp8 scaled alone": {"": scaled},
            "int4 written out": {"": [partial(one.computed, x, None, None) for one in self.four]},
        }
        for way, products in (("fp8 kernel", eight), ("int4 kernel", self.four)):
            if len(x) <= TRIED_ROWS[-1]:
                found[way] = kernel_calls(products, x)
        return found

    def expected(self, way: str, x: Tensor) -> Tensor:
        made: dict[str, Scaled | Codes] = {"fp8": self.scaled, "int4": self.codes}
        weights = self.plain[0].float() if way == "bf16" else made[way.split()[0]].weights()
        return x.float() @ weights.T


def copied(packed: Packed) -> list[Packed]:
    return [dataclasses.replace(packed, words=packed.words.clone()) for _ in range(copies_for(packed.size_bytes))]


def random_codes(site: Site, group: int, device: str) -> Codes:
    shape, groups = (site.outputs, site.inputs), site.inputs // group
    return Codes(
        codes=torch.randint(0, 16, shape, dtype=torch.uint8, device=device),
        scales=(torch.rand(site.outputs, groups, device=device) + 0.5) / site.inputs**0.5 / 4,
        zeros=torch.full((site.outputs, groups), 8.0, device=device),
        groups=torch.arange(site.inputs, device=device) // group,
    )


def kernel_calls(products: Sequence[PackedProduct], x: Tensor) -> dict[str, list[Callable[[], Tensor]]]:
    return {
        ", ".join(f"{number} {name}" for name, number in dataclasses.asdict(tuning).items()): [
            partial(one.computed, x, None, tuning) for one in products
        ]
        for tuning in products[0].tunings(len(x))
    }


def measure(
    name: str, rows: Sequence[int], group: int, speed: float, clock: Clock, device: str
) -> list[dict[str, Any]]:
    """A figure for each number of rows and each way at one site."""
    site = SITES[name]
    matrices = Matrices(site, group, device)
    figures = []
    for count in rows:
        x = torch.randn(count, site.inputs, device=device).to(DTYPE)
        for way, shapes in matrices.ways(x).items():
            floor = site.moved(way, count, group) / speed * 1e6
            figure = {"site": name, "rows": count, "way": way, "floor_us": round(floor, 2)}
            figures.append(figure | fastest(way, shapes, partial(matrices.expected, way, x), clock))
            told(figures[-1])
    return figures


def fastest(
    way: str, shapes: dict[str, list[Callable[[], Tensor]]], expected: Callable[[], Tensor], clock: Clock
) -> dict[str, Any]:
    """The time of the fastest shape, all times, and the largest error; or why the way does not run."""
    try:
        right = expected()
        error = max(float((calls[0]().float() - right).norm() / right.norm()) for calls in shapes.values())
        times = {shape: round(1e3 * clock(calls) / len(calls), 2) for shape, calls in shapes.items()}
    except Exception as reason:  # one way that does not run leaves the others
        return {"failed": f"{type(reason).__name__}: {str(reason).splitlines()[0][:200]}"}
    best = min(times, key=lambda shape: times[shape])
    found = {"us": times[best], "error": error, "is_right": error < BOUNDS.get(way, BOUND)}
    return found | ({"shape": best, "shapes_us": times} if best else {})


def told(figure: dict[str, Any]) -> None:
    place = f"{figure['site']:8}{figure['rows']:5}  {figure['way']:17}"
    if "failed" in figure:
        print(f"{place} does not run: {figure['failed']}", flush=True)
        return
    ratio = figure["us"] / figure["floor_us"]
    error = f"error {figure['error']:.4f}" + ("" if figure["is_right"] else " WRONG")
    print(f"{place}{figure['us']:9.1f} µs {ratio:6.2f} × floor  {error}  {figure.get('shape', '')}", flush=True)


def layer_sums(figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All sites together, for each number of rows and each way that ran at all of them."""
    sites = {figure["site"] for figure in figures}
    sums = []
    for rows, way in dict.fromkeys((figure["rows"], figure["way"]) for figure in figures):
        some = [one for one in figures if (one["rows"], one["way"]) == (rows, way) and "us" in one]
        if {one["site"] for one in some} == sites:
            us, floor = (sum(one[key] for one in some) for key in ("us", "floor_us"))
            sums.append({"rows": rows, "way": way, "us": round(us, 2), "floor_us": round(floor, 2)})
    return sums


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", nargs="+", choices=SITES, default=list(SITES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 128, 384])
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=128, help="inputs in a group of four bits")
    parser.add_argument("--output", type=Path, help="write everything as JSON here")
    options = parser.parse_args(arguments)
    if min(options.rows) < 1:
        parser.error("--rows: a product has at least one row")
    return options


@torch.inference_mode()
def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    if not torch.cuda.is_available():
        print(f"{SCRIPT} needs a CUDA machine; tests/engine run the same kernels on a CPU.")
        return 2
    speed = bandwidth()
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": date.today().isoformat(), "command": shlex.join(["python", SCRIPT, *arguments]), "bytes_per_s": speed,
        "group": options.group, "figures": [],
    }  # fmt: skip
    print(f"{report['machine']}, torch {report['torch']}, triton {report['triton']}, {speed / 1e12:.2f} TB/s\n")
    for name in options.sites:
        report["figures"] += measure(name, options.rows, options.group, speed, graph_milliseconds, "cuda")
        report["layer"] = layer_sums(report["figures"])
        if options.output:  # after each site: a run that is cut short leaves what it has measured
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(report, indent=1))
    print(f"\n{'all sites':15}{'rows':>5}{'us':>9}{'floor':>9}{'ratio':>7}")
    for one in report["layer"]:
        print(f"{one['way']:17}{one['rows']:3}{one['us']:9.1f}{one['floor_us']:9.1f}{one['us'] / one['floor_us']:7.2f}")
    return 0 if all(one.get("is_right", False) for one in report["figures"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
