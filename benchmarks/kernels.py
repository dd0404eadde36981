"""Checks the Triton kernels against float32 arithmetic on a CUDA machine, then times them beside their floors.

    PYTHONPATH=src python benchmarks/kernels.py [--kv-cache-dtype fp8] [--sweep] [--output results.json]

Times are medians over replays of a CUDA graph whose calls take turns on enough buffers that L2 holds none of
them. A floor is the bytes that must move, at 4.2 TB/s (H200). Exit status 1: some kernel's result is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from rota.engine.attention.triton_attention import DecodeTuning, PrefillTuning, TritonAttention
from rota.engine.layer_cache import LayerCache, from_eight_bits, in_eight_bits_together, writable
from rota.engine.ops.fused import FusedOperations
from rota.engine.ops.reference import Operations
from rota.engine.step.device_step import DeviceStep, PrefillPart, int32

DEVICE = "cuda"
FUSED = FusedOperations()
BANDWIDTH = 4.2e12
TOUCHED = 256 << 20  # bytes between two uses of a buffer: four times the L2
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16  # Llama-8B
HIDDEN, INTERMEDIATE = 4096, 14336
BOUNDS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EIGHT_BITS_BOUND = 2e-2  # of what is written

DECODES: dict[str, list[int]] = {
    "64 x 600": [600] * 64,
    "64 x 2000": [2000] * 64,
    "64 x 100..4000": [round(100 * 40 ** (row / 63)) for row in range(64)],
    "16 x 2000": [2000] * 16,
    "1 x 600": [600],
    "1 x 8000": [8000],
    "384 x 600": [600] * 384,
}
# Programs on a processor, by their warps.
RESIDENT = {1: 8, 2: 5, 4: 2}
# name -> chunks, tokens each, cached prefix
PREFILLS = {"8 x 512": (8, 512, 0), "1 x 4096": (1, 4096, 0), "1 x 2048 after 2048": (1, 2048, 2048)}


# --- steps -------------------------------------------------------------------------------------------------


def cache(blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, eight: bool) -> LayerCache:
    shape = (blocks, kv_heads, block_size, head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=DEVICE).normal_() for _ in range(2))
    if not eight:
        return LayerCache(keys, values)
    keys, values, scales = in_eight_bits_together(keys, values)
    return LayerCache(keys.contiguous(), values.contiguous(), scales)


def read(kept: LayerCache) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache, whatever it holds them in, in float32."""
    if kept.scales is None:
        return kept.keys.float(), kept.values.float()
    keys, values = (
        from_eight_bits(codes, kept.scales[..., place], torch.float32)
        for place, codes in enumerate((kept.keys, kept.values))
    )
    return keys, values


def page_tables(lengths: list[int], block_size: int, free: Iterable[int]) -> Tensor:
    """[rows + 1, pages], taking blocks from `free`; entries past a row's end name block 0."""
    pages, blocks = [-(-length // block_size) for length in lengths], iter(free)
    tables = torch.zeros(len(lengths) + 1, max(pages), dtype=torch.int32)
    for row, count in enumerate(pages):
        tables[row, :count] = int32([next(blocks) for _ in range(count)])
    return tables.to(DEVICE)


def step(tables: Tensor, decode_lengths: list[int], prefill: PrefillPart | None = None) -> DeviceStep:
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    rows = int32(list(range(len(decode_lengths))), DEVICE)
    return DeviceStep(nothing, nothing, nothing, tables, rows, int32(decode_lengths, DEVICE), prefill)


def token_step(positions: Tensor, slots: Tensor) -> DeviceStep:
    nobody = int32([], DEVICE)
    return DeviceStep(positions, positions, slots, nobody, nobody, nobody)


def prefill_part(starts: list[int], lengths: list[int]) -> PrefillPart:
    rows = tuple(range(len(lengths)))
    offsets = [sum(lengths[:chunk]) for chunk in range(len(lengths) + 1)]
    return PrefillPart(
        int32(rows, DEVICE), int32(starts, DEVICE), int32(offsets, DEVICE), max(lengths),
        rows, tuple(starts), tuple(lengths),
    )  # fmt: skip


def dense(paged: Tensor, tables: Tensor, row: int, length: int) -> Tensor:
    """[length, kv_heads, head_dim] float32 of one row."""
    blocks = paged[tables[row].long()].float()  # [pages, kv_heads, block_size, head_dim]
    return blocks.transpose(1, 2).flatten(0, 1)[:length]


def attend(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Plain causal attention in float32; query [tokens, heads, head_dim] begins at position `start`."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    own = start + torch.arange(query.shape[0], device=DEVICE)
    logits.masked_fill_(torch.arange(keys.shape[0], device=DEVICE) > own[:, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)


# --- checks ------------------------------------------------------------------------------------------------


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def worst(errors: list[float]) -> float:
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def check_attention(eight: bool, dice: random.Random) -> tuple[str, float, float]:
    """One random shape: (what, the worse error of decode and prefill, its bound)."""
    kv_heads, group, block_size = dice.choice([1, 2, 8]), dice.choice([1, 3, 4, 8]), dice.choice([8, 16, 32])
    head_dim, dtype = dice.choice([64, 80, 96, 128]), dice.choice(list(BOUNDS))
    lengths = [dice.randint(1, 700) for _ in range(dice.randint(1, 9))]
    blocks = sum(-(-length // block_size) for length in lengths)
    kept = cache(blocks, kv_heads, block_size, head_dim, dtype, eight)
    keys, values = read(kept)
    tables = page_tables(lengths, block_size, dice.sample(range(blocks), blocks))
    scale, errors = head_dim**-0.5, []
    attention = TritonAttention(scale, DecodeTuning(processors=dice.choice([None, 1, 5]), spare=dice.choice([0, 256])))

    def compare(found: Tensor, query: Tensor, row: int, start: int, end: int) -> None:
        k, v = dense(keys, tables, row, end), dense(values, tables, row, end)
        errors.append(relative_error(found, attend(query, k, v, start, scale)))

    query = torch.randn(len(lengths), kv_heads * group, head_dim, device=DEVICE).to(dtype)
    found = attention.decode(query, kept, step(tables, lengths))
    for row, length in enumerate(lengths):
        compare(found[row : row + 1], query[row : row + 1], row, length - 1, length)

    starts = [dice.choice([0, dice.randrange(length)]) for length in lengths]
    chunks = [length - start for start, length in zip(starts, lengths, strict=True)]
    query = torch.randn(sum(chunks), kv_heads * group, head_dim, device=DEVICE).to(dtype)
    part = prefill_part(starts, chunks)
    found = attention.prefill(query, kept, step(tables, [], part))
    for row, (first, start, count) in enumerate(zip(part.offsets.tolist(), starts, chunks, strict=False)):
        mine = slice(first, first + count)
        compare(found[mine], query[mine], row, start, start + count)
    what = f"attention {kv_heads}x{group} heads of {head_dim}, blocks of {block_size}, {len(lengths)} rows, {dtype}"
    what += ", keys in eight bits" if eight else ""
    return what, worst(errors), BOUNDS[dtype]


def check_operations(eight: bool, dtype: torch.dtype, head_dim: int, with_norms: bool) -> tuple[str, float, float]:
    """Every operation beside its float32 twin: (what, the worst error, its bound)."""
    heads, kv_heads, tokens, width, block_size = 6, 2, 37, 1536, 16

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    x, residual, weight, gate_up = draw(tokens, width), draw(tokens, width), draw(width), draw(tokens, 2 * width)
    qkv, norm = draw(tokens, (heads + 2 * kv_heads) * head_dim), draw(2, head_dim)
    rotary = draw(99, head_dim).float()
    positions = torch.randint(99, (tokens,), device=DEVICE)
    slots = torch.randperm(9 * block_size, device=DEVICE)[:tokens]
    where = token_step(positions, slots)

    def results(ops: Operations, cast: torch.dtype) -> list[Tensor]:
        norms = (norm[0].to(cast), norm[1].to(cast), 1e-5) if with_norms else None
        kept = cache(9, kv_heads, block_size, head_dim, cast, eight)
        for each in (kept.keys, kept.values):
            writable(each).zero_()
        query = ops.rotate_and_store(qkv.to(cast), rotary, where, kept, norms)
        normed = ops.rms_norm(x.to(cast), weight.to(cast), 1e-5)
        added = ops.add_rms_norm(x.to(cast, copy=True), residual.to(cast, copy=True), weight.to(cast), 1e-5)
        return [query, *read(kept), normed, *added, ops.silu_multiply(gate_up.to(cast))]

    pairs = zip(results(FUSED, dtype), results(Operations(), torch.float32), strict=True)
    what = f"operations, head_dim {head_dim}, {'with' if with_norms else 'no'} norms, {dtype}"
    # A number that the two round to different codes is a step apart.
    return (
        what,
        worst([relative_error(*pair) for pair in pairs]),
        max(BOUNDS[dtype], EIGHT_BITS_BOUND if eight else 0.0),
    )


# --- times -------------------------------------------------------------------------------------------------


def microseconds(calls: list[Callable[[], Any]], replays: int = 15) -> float:
    """Median time of one call, all of them replayed in turn as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    turns = calls * max(1, 16 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in turns:
            call()
    times = []
    for replay in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / len(turns))
    return statistics.median(times)


def measured(calls: list[Callable[[], Any]]) -> float:
    """`microseconds`, or infinity with a printed reason where a configuration does not run."""
    try:
        return microseconds(calls)
    except Exception as reason:
        print(f"    does not run: {type(reason).__name__}: {str(reason).splitlines()[0][:120]}", flush=True)
        torch.cuda.synchronize()
        return math.inf


def decode_calls(eight: bool, lengths: list[int]) -> tuple[Callable[[TritonAttention], list[Callable[[], Any]]], float]:
    """(attention -> calls on different blocks, floor in microseconds)."""
    held = sum(lengths) * KV_HEADS * 2 * (HEAD_DIM + 4 if eight else HEAD_DIM * 2)
    moved = held + 2 * len(lengths) * HEADS * HEAD_DIM * 2
    sets = min(64, 1 + TOUCHED // held)
    pages = sum(-(-length // BLOCK_SIZE) for length in lengths)
    kept = cache(sets * pages, KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.bfloat16, eight)
    free = torch.randperm(sets * pages).tolist()
    steps = [step(page_tables(lengths, BLOCK_SIZE, free[turn * pages :]), lengths) for turn in range(sets)]
    query = torch.randn(len(lengths), HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)

    def calls(attention: TritonAttention) -> list[Callable[[], Any]]:
        return [partial(attention.decode, query, kept, each) for each in steps]

    return calls, moved / BANDWIDTH * 1e6


def prefill_calls(
    eight: bool, chunks: int, length: int, prefix: int
) -> tuple[Callable[[TritonAttention], list[Callable[[], Any]]], list[Callable[[], Any]], float]:
    """(attention -> calls, torch's flash attention on contiguous tensors, floating-point operations)."""
    lengths = [prefix + length] * chunks
    pages = sum(-(-total // BLOCK_SIZE) for total in lengths)
    kept = cache(pages, KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.bfloat16, eight)
    tables = page_tables(lengths, BLOCK_SIZE, torch.randperm(pages).tolist())
    only = step(tables, [], prefill_part([prefix] * chunks, [length] * chunks))
    query = torch.randn(chunks * length, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)

    q = query.view(chunks, length, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    k, v = torch.randn(2, chunks, HEADS, prefix + length, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    edge = causal_lower_right(length, prefix + length) if prefix else None

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=edge, is_causal=edge is None)

    def calls(attention: TritonAttention) -> list[Callable[[], Any]]:
        return [partial(attention.prefill, query, kept, only)]

    pairs = chunks * (length * prefix + length * (length + 1) / 2)
    return calls, [flash], 4.0 * pairs * HEADS * HEAD_DIM


def operation_calls(eight: bool, tokens: int) -> dict[str, tuple[list[Callable[[], Any]], float]]:
    """name -> (calls on different buffers, bytes moved by one)."""

    def buffers(width: int) -> list[Tensor]:
        sets = min(32, 1 + TOUCHED // (tokens * width * 2))
        return [torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(sets)]

    weight = torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    blocks = -(-tokens // BLOCK_SIZE)
    kept = cache(blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.bfloat16, eight)
    rotary = torch.randn(8192, HEAD_DIM, device=DEVICE)
    positions, slots = torch.arange(tokens, device=DEVICE), torch.randperm(blocks * BLOCK_SIZE, device=DEVICE)[:tokens]
    where = token_step(positions, slots)
    rows = [(x, torch.randn_like(x)) for x in buffers(HIDDEN)]
    qkv_width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    gates, qkvs = buffers(2 * INTERMEDIATE), buffers(qkv_width)
    size = 2 * tokens
    return {
        "rms_norm": ([partial(FUSED.rms_norm, x, weight, 1e-5) for x, _ in rows], 2 * HIDDEN * size),
        "add_rms_norm": (
            [partial(FUSED.add_rms_norm, *row, weight, 1e-5) for row in rows], 4 * HIDDEN * size,
        ),
        "silu_multiply": ([partial(FUSED.silu_multiply, gate_up) for gate_up in gates], 3 * INTERMEDIATE * size),
        "rotate_and_store": (
            [partial(FUSED.rotate_and_store, qkv, rotary, where, kept, None) for qkv in qkvs],
            2 * qkv_width * size + 4 * HEAD_DIM * tokens,
        ),
    }  # fmt: skip


# --- the report --------------------------------------------------------------------------------------------


def run_checks(report: dict[str, Any], eight: bool) -> bool:
    dice, all_right = random.Random(0), True
    torch.manual_seed(0)
    checks: list[Callable[[], tuple[str, float, float]]] = [partial(check_attention, eight, dice)] * 12
    checks += [partial(check_operations, eight, *shape) for shape in product(BOUNDS, (80, 128), (False, True))]
    for check in checks:
        try:
            what, error, bound = check()
        except Exception as reason:
            what, error, bound = f"{type(reason).__name__}: {reason}"[:300], math.inf, 0.0
        right = error <= bound
        all_right &= right
        report["checks"].append({"what": what, "error": error, "bound": bound, "right": right})
        print(f"{'ok   ' if right else 'WRONG'} {error:9.2e} (bound {bound:.0e})  {what}", flush=True)
    return all_right


def run_times(report: dict[str, Any], eight: bool) -> None:
    print(f"\n{'decode attention':24}{'us':>9}{'floor':>9}{'ratio':>8}")
    for name, lengths in DECODES.items():
        calls, floor = decode_calls(eight, lengths)
        time = measured(calls(TritonAttention(HEAD_DIM**-0.5)))
        report["decode"][name] = {"us": time, "floor_us": floor}
        print(f"{name:24}{time:9.1f}{floor:9.1f}{time / floor:8.2f}", flush=True)
    print(f"\n{'prefill attention':24}{'us':>9}{'TFLOP/s':>9}{'torch':>8}")
    for name, shape in PREFILLS.items():
        prefill, flash, work = prefill_calls(eight, *shape)
        time, torch_time = measured(prefill(TritonAttention(HEAD_DIM**-0.5))), measured(flash)
        report["prefill"][name] = {"us": time, "tflops": work / time / 1e6, "torch_tflops": work / torch_time / 1e6}
        print(f"{name:24}{time:9.1f}{work / time / 1e6:9.0f}{work / torch_time / 1e6:8.0f}", flush=True)
    print(f"\n{'operation':24}{'us':>9}{'floor':>9}{'ratio':>8}")
    for tokens in (64, 4096):
        for name, (calls_, moved) in operation_calls(eight, tokens).items():
            time, floor = measured(calls_), moved / BANDWIDTH * 1e6
            report["operations"][f"{name} {tokens}"] = {"us": time, "floor_us": floor}
            print(f"{name + ' ' + str(tokens):24}{time:9.1f}{floor:9.1f}{time / floor:8.2f}", flush=True)


def compare(
    title: str, cases: dict[str, Callable[[TritonAttention], list[Callable[[], Any]]]],
    tunings: dict[str, TritonAttention],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """A table of microseconds, tunings down, cases across; then the best of each column."""
    print(f"\n{title:28}" + "".join(f"{name:>21}" for name in cases))
    table: dict[str, dict[str, float]] = {}
    for label, attention in tunings.items():
        table[label] = {name: measured(calls(attention)) for name, calls in cases.items()}
        print(f"{label:28}" + "".join(f"{time:21.1f}" for time in table[label].values()), flush=True)
    best = [min((times[name], label) for label, times in table.items())[1] for name in cases]
    print(f"{'best':28}" + "".join(f"{label:>21}" for label in best), flush=True)
    return table


def run_sweep(report: dict[str, Any], eight: bool) -> None:
    scale = HEAD_DIM**-0.5
    decodes = {name: decode_calls(eight, lengths)[0] for name, lengths in DECODES.items()}
    shapes = [
        (tile, warps, stages)
        for tile, warps, stages in product((16, 32, 64, 128), (1, 2, 4), (2, 3, 4))
        if tile * stages <= 384 and tile <= 64 * warps
    ]
    report["sweep"]["decode"] = compare(
        "decode tile/warps/stages/r",
        decodes,
        {
            f"{t}/{w}/{s}/{r}": TritonAttention(
                scale, DecodeTuning(tile=t, warps=w, stages=s, registers=r, resident=RESIDENT[w], programs=RESIDENT[w])
            )
            for (t, w, s), r in product(shapes, (168, 200, 248) if eight else (168,))
        },
    )
    prefills = {name: prefill_calls(eight, *shape)[0] for name, shape in PREFILLS.items()}
    blocks = [*product((128,), (32, 64, 128), (8,), (2, 3, 4)), *product((64,), (32, 64), (4,), (2, 3)),
              *product((128,), (64,), (4,), (2, 3)), *product((256,), (64,), (8,), (2,))]  # fmt: skip
    report["sweep"]["prefill"] = compare(
        "prefill queries/tile/w/s",
        prefills,
        {"/".join(map(str, block)): TritonAttention(scale, None, PrefillTuning(*block)) for block in blocks},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also compare tile, warp and stage choices")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="what keys and values are in")
    parser.add_argument("--output", type=Path, help="write everything as JSON here")
    options = parser.parse_args()
    eight = options.kv_cache_dtype == "fp8"
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py needs a CUDA machine; tests/engine run the same kernels on a CPU.")
        return 2
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "kv_cache_dtype": options.kv_cache_dtype,
        "checks": [], "decode": {}, "prefill": {}, "operations": {}, "sweep": {},
    }  # fmt: skip
    print(f"{report['machine']}, torch {report['torch']}, triton {report['triton']}\n")
    all_right = run_checks(report, eight)
    run_times(report, eight)
    if options.sweep:
        run_sweep(report, eight)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1))
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
