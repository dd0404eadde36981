"""Measures attention, and steps of an 8B shape, where long rows stand among short ones, beside the bytes they read.

    python benchmarks/long_rows.py [--base FOLDER] [--only attention prefill steps sweep] [--output FILE]

FOLDER is a checkout to compare with: its attention kernels run in the same process, over the same caches. Times are
medians over replays of a graph of 32 layers; a floor is the bytes that must move at the bandwidth measured first. Every
case leaves its figures in FILE at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from long_steps import LONGEST, measure_steps
from torch import Tensor

from rota.engine.attention.triton_attention import DecodeTuning, PrefillTuning, TritonAttention
from rota.engine.layer_cache import LayerCache
from rota.engine.step.device_step import DeviceStep, PrefillPart, int32

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 32, 8, 128, 16  # Llama-8B
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # of one layer
DECODES: dict[str, list[int]] = {
    "1 x 600": [600],
    "64 x 600": [600] * 64,
    "64 x 2,000": [2000] * 64,
    "63 x 600 + 1 x 7,300": [600] * 63 + [7300],
    "56 x 600 + 8 x 7,300": [600] * 56 + [7300] * 8,
    "32 x 600 + 32 x 7,300": [600] * 32 + [7300] * 32,
    "63 x 600 + 1 x 100,000": [600] * 63 + [100_000],
    "1 x 300": [300],
    "1 x 7,300": [7300],
    "1 x 128,000": [128_000],
    "1 to 128,000": [round(128_000 ** (row / 63)) for row in range(64)],
    "4 x 600": [600] * 4,
    "8 x 600": [600] * 8,
    "16 x 600": [600] * 16,
    "24 x 600": [600] * 24,
    "32 x 600": [600] * 32,
    "40 x 600": [600] * 40,
    "80 x 600": [600] * 80,
    "128 x 600": [600] * 128,
}
# name -> chunks of (tokens, cached prefix)
PREFILLS: dict[str, list[tuple[int, int]]] = {
    "8 x 512": [(512, 0)] * 8,
    "1 x 2,048 after 2,048": [(2048, 2048)],
    "1 x 100": [(100, 0)],
    "1 x 100 after 600": [(100, 600)],
    "1 x 32 after 7,300": [(32, 7300)],
    "1 x 32 after 100,000": [(32, 100_000)],
    "1 x 256 after 100,000": [(256, 100_000)],
    "1 x 1,024 after 100,000": [(1024, 100_000)],
    "1 x 32 after 100,000 + 7 x 100": [(32, 100_000)] + [(100, 0)] * 7,
}
SCALE = HEAD_DIM**-0.5
REPLAYS = 9
Kinds = dict[str, Any]  # by name, something that attends
Call = Callable[[DeviceStep, int], Tensor]  # a layer


def _random(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


class Caches:
    """One cache for every layer, and page tables that take its blocks in no order."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.blocks = tokens // BLOCK_SIZE + rows + 1
        shape = (self.blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.layers = [LayerCache(keys=_random(shape), values=_random(shape)) for _ in range(LAYERS)]

    def tables(self, lengths: Sequence[int]) -> Tensor:
        pages = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(self.blocks, dtype=torch.int32, device="cuda")
        tables = torch.zeros(len(lengths) + 1, max(pages), dtype=torch.int32, device="cuda")
        used = 0
        for row, count in enumerate(pages):
            tables[row, :count] = order[used : used + count]
            used += count
        return tables


def step_of(tables: Tensor, decode_lengths: Sequence[int], chunks: Sequence[tuple[int, int]] = ()) -> DeviceStep:
    nothing = torch.empty(0, dtype=torch.int64, device="cuda")
    part = None
    if chunks:
        rows = tuple(range(len(chunks)))
        tokens, starts = zip(*chunks, strict=True)
        offsets = [sum(tokens[:chunk]) for chunk in range(len(chunks) + 1)]
        # As in a graph, which knows of no chunk how long it is.
        part = PrefillPart(
            int32(rows, "cuda"), int32(starts, "cuda"), int32(offsets, "cuda"), sum(tokens), rows, starts, tokens
        )
    return DeviceStep(
        token_ids=nothing,
        positions=nothing,
        addresses=nothing,
        tables=tables,
        decode_rows=int32(list(range(len(decode_lengths))), "cuda"),
        decode_lengths=int32(list(decode_lengths), "cuda"),
        prefill=part,
    )


def microseconds(attend: Call, new_step: Callable[[], DeviceStep]) -> float:
    """Of one layer, over replays of a graph that begins with a step of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(new_step(), 0)
    torch.cuda.synchronize()
    graph, captured = torch.cuda.CUDAGraph(), new_step()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            attend(captured, layer)
    times = []
    for replay in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) * 1e3 / LAYERS)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times)


class WithoutWindows:
    """An attention of a checkout that knows no windows, behind today's interface; these cases have none."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def decode(self, query: Tensor, cache: LayerCache, step: DeviceStep, _window: int = 0) -> Tensor:
        return self._attention.decode(query, cache.keys, cache.values, step)

    def prefill(self, query: Tensor, cache: LayerCache, step: DeviceStep, _window: int = 0) -> Tensor:
        return self._attention.prefill(query, cache.keys, cache.values, step)


def base_attention(folder: Path) -> ModuleType:
    """The module of the same name out of another checkout, which leaves this one's in place."""
    name = "rota.engine.attention"
    package = importlib.import_module(name)
    ours = {each: sys.modules.pop(each) for each in list(sys.modules) if each.startswith(name + ".triton")}
    path, package.__path__ = package.__path__, [str(folder / "src/rota/engine/attention")]
    module = importlib.import_module(name + ".triton_attention")
    for each in [each for each in sys.modules if each.startswith(name + ".triton")]:
        del sys.modules[each]
    package.__path__ = path
    sys.modules.update(ours)
    # Attention that is not shared out by tokens asks the step for its longest row; a graph told it the longest of all.
    setattr(DeviceStep, "longest_decode", LONGEST)  # noqa: B010 - no such field any more
    return module


class Report:
    """What was measured so far, in the file after every case."""

    def __init__(self, facts: dict[str, Any], output: Path | None) -> None:
        self.facts, self._output = facts, output

    def note(self, section: str, name: str, figures: dict[str, Any]) -> None:
        self.facts.setdefault(section, {})[name] = figures
        words = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        )
        print(f"{section:10} {name:34} {words}", flush=True)
        if self._output:
            self._output.write_text(json.dumps(self.facts, indent=1) + "\n", "utf-8")


def measure_decodes(report: Report, caches: Caches, kinds: Kinds, section: str = "decode") -> None:
    for name, lengths in DECODES.items():
        query = torch.randn(len(lengths), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        read = sum(lengths) * TOKEN_BYTES + 2 * query.nbytes
        new_step = partial(step_of, caches.tables(lengths), lengths)
        calls = {kind: decode_call(attention, query, caches) for kind, attention in kinds.items()}
        report.note(section, name, compare(calls, new_step, read / report.facts["bytes_per_s"] * 1e6))


def measure_prefills(report: Report, caches: Caches, kinds: Kinds, section: str = "prefill") -> None:
    for name, chunks in PREFILLS.items():
        query = torch.randn(sum(tokens for tokens, _ in chunks), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        read = sum(map(sum, chunks)) * TOKEN_BYTES + 2 * query.nbytes
        new_step = partial(step_of, caches.tables([sum(chunk) for chunk in chunks]), [], chunks)
        calls = {kind: prefill_call(attention, query, caches) for kind, attention in kinds.items()}
        figures = compare(calls, new_step, read / report.facts["bytes_per_s"] * 1e6)
        pairs = sum(tokens * prefix + tokens * (tokens + 1) / 2 for tokens, prefix in chunks)
        if "new_us" in figures:
            figures["new_tflops"] = round(4 * pairs * HEADS * HEAD_DIM / figures["new_us"] / 1e6, 1)
        report.note(section, name, figures)


def decode_call(attention: Any, query: Tensor, caches: Caches) -> Call:
    return lambda step, layer: attention.decode(query, caches.layers[layer], step)


def prefill_call(attention: Any, query: Tensor, caches: Caches) -> Call:
    return lambda step, layer: attention.prefill(query, caches.layers[layer], step)


def compare(calls: dict[str, Call], new_step: Callable[[], DeviceStep], floor_us: float) -> dict[str, Any]:
    """Each kind's time, and how far their results are apart."""
    results = [call(new_step(), 0).float() for call in calls.values()]
    figures: dict[str, Any] = {"floor_us": round(floor_us, 2)}
    figures |= {f"{kind}_us": round(microseconds(call, new_step), 2) for kind, call in calls.items()}
    if "new_us" in figures:
        figures["new_over_floor"] = round(figures["new_us"] / floor_us, 3)
    figures["difference"] = max(float((one - results[0]).norm() / results[0].norm()) for one in results)
    return figures


# What one default is changed to.
DECODE_TUNINGS: list[dict[str, int]] = [
    {},
    {"resident": 4},
    {"resident": 6},
    {"resident": 12},
    {"resident": 6, "cuts": 4},
    {"cuts": 1},
    {"cuts": 4},
    {"apart": 0},
    {"apart": 128},
    {"spare": 0},
]
PREFILL_TUNINGS: list[dict[str, int]] = [{}, {"cuts": 2}, {"spare": 256, "shortest": 256}]


def sweep(report: Report, caches: Caches) -> None:
    """How finely units are cut."""
    decodes = {str(given): TritonAttention(SCALE, DecodeTuning(**given)) for given in DECODE_TUNINGS}
    prefills = {str(given): TritonAttention(SCALE, None, PrefillTuning(**given)) for given in PREFILL_TUNINGS}
    measure_decodes(report, caches, decodes, "decode sweep")
    measure_prefills(report, caches, prefills, "prefill sweep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a checkout whose attention is measured beside ours")
    parser.add_argument("--only", nargs="+", default=["attention", "prefill", "steps"])
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    torch.manual_seed(0)
    facts = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/long_rows.py", *sys.argv[1:]]),
        "bytes_per_s": bandwidth(),
    }
    report = Report(facts, given.output)
    print(f"{facts['machine']}: {facts['bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    base = base_attention(given.base).TritonAttention if given.base else None
    kinds: dict[str, Any] = {"base": WithoutWindows(base(SCALE))} if base else {}
    kinds["new"] = TritonAttention(SCALE)
    if {"attention", "prefill", "sweep"} & set(given.only):
        caches = Caches(max(sum(lengths) for lengths in DECODES.values()), 128)
        if "attention" in given.only:
            measure_decodes(report, caches, kinds)
        if "prefill" in given.only:
            measure_prefills(report, caches, kinds)
        if "sweep" in given.only:
            sweep(report, caches)
        del caches
        torch.cuda.empty_cache()
    if "steps" in given.only:
        with tempfile.TemporaryDirectory() as scratch:
            measure_steps(report, Path(scratch), kinds)


if __name__ == "__main__":
    main()
