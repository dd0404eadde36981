"""TritonAttention runs paged attention as Triton kernels, with launches that depend on nothing inside a tensor.

What varies from step to step (lengths, rows, page tables) is read on the device, so a captured CUDA graph stays
right when it is replayed with other lengths than it was captured with.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.attention.triton_decode import combine_heads_kernel, decode_kernel
from rota.engine.attention.triton_prefill import COMBINED_ROWS, combine_kernel, prefill_kernel
from rota.engine.attention.triton_shares import CutBounds, share_chunks, share_decodes
from rota.engine.layer_cache import LayerCache
from rota.engine.programmatic_launch import programmatic
from rota.engine.step.device_step import DeviceStep, PrefillPart

# ── triton tuning ───────────────────────────────────────────────────────────────────────────────────────────────────
# A tuning is what the attention kernels were measured to be quick with: their shapes, and how finely work is cut.

# Rows up to which a program has two warps. With one each, 64 x 600 tokens took as long, but whole steps of 64 rows took
# 3 % longer than on other machines before; that was with ten programs to a processor, with eight it was not measured.
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """`benchmarks/kernels.py --sweep` compares shapes, `benchmarks/long_rows.py --only sweep` the rest.

    A program is one warp, so that no thread waits for another's part of a sum (decision 0009).
    """

    tile: int = 16  # tokens per iteration
    warps: int = 1  # two at least where heads have 256 dimensions
    stages: int = 3
    registers: int = 200  # of a thread, at most
    resident: int = 8  # programs of the grid per processor: as many as run at once, and no more
    apart: int = 8  # decodes of a step up to which a kernel of its own combines: 6.8 instead of 9.2 us at 1 x 600
    # See `CutBounds`.
    programs: int = 8  # to run at once on a processor: enough to keep its share of the memory bus busy
    cuts: int = 1
    shortest: int = 96
    most_pieces: int = 64
    spare: int = 256
    spare_of_few: int = 64  # where a kernel of its own combines
    fits: bool = True
    processors: int | None = None  # None: as many as the device has


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Of a chunk's queries."""

    queries: int = 128  # packed (token, head) rows per program
    tile: int = 64  # keys per iteration
    warps: int = 8
    stages: int = 3
    programs: int = 1  # at once on a processor: shared memory holds no second one
    cuts: int = 1
    shortest: int = 1024
    most_pieces: int = 64
    spare: int = 1024
    processors: int | None = None
    fits: bool = False


# Codes in eight bits take half the shared memory, so a tile has twice the tokens.
EIGHT_BIT_DECODES = DecodeTuning(tile=32)
# With six programs of two warps, processors get unequal numbers: 142 instead of 127 us at 64 x 2,000.
FEW_DECODES = DecodeTuning(
    tile=32, warps=2, registers=168, resident=5, programs=4, cuts=2, shortest=320, fits=False
)  # fmt: skip
# By counts in the compiler's output for an H200: 64 tokens take a warp 1,000 instructions with these registers, and 32
# at a time 1,276; in 16 bits they take 1,062, and twice the time to be read.
FEW_EIGHT_BIT_DECODES = replace(FEW_DECODES, tile=64, registers=200)
# Blocks of fewer queries: codes become numbers in registers, and two programs of four warps hide that better than one
# of eight (8 x 512: 118 instead of 130 us). In 16 bits it is the other way round (1 x 2,048: 111 instead of 104).
EIGHT_BIT_PREFILLS = PrefillTuning(queries=64, warps=4)


def decode_tuning_for(cache: LayerCache, decodes: int) -> DecodeTuning:
    if cache.scales is None:
        return FEW_DECODES if decodes <= FEW_ROWS else DecodeTuning()
    return FEW_EIGHT_BIT_DECODES if decodes <= FEW_ROWS else EIGHT_BIT_DECODES


def prefill_tuning_for(cache: LayerCache) -> PrefillTuning:
    return PrefillTuning() if cache.scales is None else EIGHT_BIT_PREFILLS


def bounds_of(tuning: DecodeTuning | PrefillTuning, device: torch.device, kv_heads: int, spare: int) -> CutBounds:
    slots = slots_of(tuning.programs, tuning, device, kv_heads)
    return CutBounds(slots, tuning.cuts, tuning.shortest, tuning.most_pieces, spare, tuning.fits)


def slots_of(programs: int, tuning: DecodeTuning | PrefillTuning, device: torch.device, kv_heads: int) -> int:
    """Programs of one kv head, if a processor has so many of all."""
    return max(1, (tuning.processors or _processors(device)) * programs // kv_heads)


def choose_programs(decodes: int, bounds: CutBounds, resident: int) -> int:
    """Programs of one kv head: all that can run at once, or so many that uncut rows make full rounds."""
    if decodes <= resident:
        return min(resident, bounds.shares(decodes))
    rounds = -(-decodes // resident)
    return -(-decodes // rounds)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


# The smallest number of rows a matrix instruction takes.
SMALLEST_DOT = 16
# Float32 multiplies without tensor cores, every operand in registers: 32 queries are what fits.
LARGEST_FLOAT32_BLOCK = 32
_OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(slots=True)
class _DecodeShares:
    """What `share_decodes` wrote, and how many layers have used it."""

    entries: Tensor
    ranges: Tensor
    taken: Tensor
    calls: int = 0


class TritonAttention:
    """Paged attention for GPUs, or for a CPU under Triton's interpreter (TRITON_INTERPRET=1).

    Shares of a step are written once for all layers of one window. The newest step is known by identity, so its
    tensors must not change under way, and no two graphs are captured with the same one.
    """

    def __init__(
        self,
        scale: float,
        decode_tuning: DecodeTuning | None = None,
        prefill_tuning: PrefillTuning | None = None,
    ) -> None:
        self._scale = scale * math.log2(math.e)
        self._decode_tuning = decode_tuning
        self._prefill_tuning = prefill_tuning
        # The interpreter keeps bfloat16 as integers and multiplies those; it is right only in float32.
        self._is_interpreted = triton.knobs.runtime.interpret
        self._step: DeviceStep | None = None
        self._is_captured = False
        self._decodes: dict[int, _DecodeShares] = {}  # by window
        self._chunks: dict[int, Tensor] = {}
        self._ended: Tensor | None = None  # counters of the decode kernel, which leaves them at zero

    def decode(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor:
        assert query.shape[0] == step.decodes
        tuning, device = self._decode_tuning or decode_tuning_for(cache, step.decodes), query.device
        _, heads, head_dim = query.shape
        kv_heads, block_size = cache.keys.shape[1:3]
        group = heads // kv_heads
        tile = _tile(tuning.tile, query.dtype)
        is_apart = step.decodes <= tuning.apart
        bounds = bounds_of(tuning, device, kv_heads, tuning.spare_of_few if is_apart else tuning.spare)
        shares = self._decode_shares(step, window, bounds, tile, kv_heads)
        if self._ended is None or self._ended.numel() < bounds.pieces * kv_heads:
            self._ended = torch.zeros(bounds.pieces * kv_heads, dtype=torch.int32, device=device)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        partial = torch.empty(bounds.pieces, heads, head_dim, dtype=torch.float32, device=device)
        logs = torch.empty(bounds.pieces, heads, dtype=torch.float32, device=device)
        shape = {"HEADS": heads, "HEAD_DIM": head_dim, "DIMS": triton.next_power_of_2(head_dim)}
        programs = choose_programs(step.decodes, bounds, slots_of(tuning.resident, tuning, device, kv_heads))
        decode_kernel[(kv_heads, programs)](
            query, cache.keys, cache.values, cache.scales, step.tables, shares.entries,
            shares.taken, output, partial, logs, self._ended, self._scale, shares.calls,
            *_strides(query, cache, step.tables), **shape, GROUP=group, BLOCK_SIZE=block_size, TILE=tile,
            APART=is_apart, GROUP_TILE=max(SMALLEST_DOT, triton.next_power_of_2(group)),
            GROUP_ROWS=triton.next_power_of_2(group), OPERAND=self._operand(query, cache), **programmatic(query),
            num_warps=max(tuning.warps, shape["DIMS"] // 128), num_stages=tuning.stages, maxnreg=tuning.registers,
        )  # fmt: skip
        shares.calls += 1
        if is_apart:
            combine_heads_kernel[(heads, step.decodes)](
                shares.ranges, output, partial, logs, **shape, **programmatic(query), num_warps=4
            )
        return output

    def prefill(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor:
        assert step.prefill is not None
        part, device = step.prefill, query.device
        tuning = self._prefill_tuning or prefill_tuning_for(cache)
        tokens, heads, head_dim = query.shape
        kv_heads, block_size = cache.keys.shape[1:3]
        group = heads // kv_heads
        queries = min(tuning.queries, LARGEST_FLOAT32_BLOCK) if query.dtype == torch.float32 else tuning.queries
        tile = _tile(tuning.tile, query.dtype)
        bounds = bounds_of(tuning, device, kv_heads, tuning.spare)
        units = triton.cdiv(tokens * group, queries) + part.rows.shape[0]
        shares = self._chunk_shares(step, part, window, bounds, units, group, queries, tile)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        partial = torch.empty(bounds.pieces, kv_heads, queries, head_dim, dtype=torch.float32, device=device)
        logs = torch.empty(bounds.pieces, kv_heads, queries, dtype=torch.float32, device=device)
        shape = {"HEADS": heads, "GROUP": group, "HEAD_DIM": head_dim, "DIMS": triton.next_power_of_2(head_dim)}
        prefill_kernel[(kv_heads, bounds.shares(units))](
            query, cache.keys, cache.values, cache.scales, step.tables, shares,
            part.rows, part.starts, part.offsets, output, partial, logs, self._scale, window,
            *_strides(query, cache, step.tables), **shape, BLOCK_SIZE=block_size, QUERIES=queries, TILE=tile,
            WINDOWED=window > 0, OPERAND=self._operand(query, cache), num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        combine_kernel[(kv_heads, queries // COMBINED_ROWS)](
            shares, part.offsets, output, partial, logs, **shape, QUERIES=queries, ROWS=COMBINED_ROWS, num_warps=4
        )
        return output

    def _decode_shares(
        self, step: DeviceStep, window: int, bounds: CutBounds, tile: int, kv_heads: int
    ) -> _DecodeShares:
        self._forget_but(step)
        if window not in self._decodes:
            entries, ranges, taken = (
                torch.empty(size, dtype=torch.int32, device=step.tables.device)
                for size in (bounds.numbers(step.decodes), 2 * step.decodes, kv_heads)
            )
            self._decodes[window] = _DecodeShares(entries, ranges, taken)
            # As many units as there can be rows: one kernel for every batch.
            units = triton.next_power_of_2(max(step.decodes, step.tables.shape[0]))
            share_decodes[(1,)](
                entries, ranges, taken, step.decode_rows, step.decode_lengths, step.decodes, window, *bounds.arguments,
                UNITS=units, KV_HEADS=kv_heads, TILE=tile, FITS=bounds.fits, num_warps=4,
            )  # fmt: skip
        return self._decodes[window]

    def _chunk_shares(
        self,
        step: DeviceStep,
        part: PrefillPart,
        window: int,
        bounds: CutBounds,
        units: int,
        group: int,
        queries: int,
        tile: int,
    ) -> Tensor:
        self._forget_but(step)
        if window not in self._chunks:
            numbers = bounds.numbers(units)
            self._chunks[window] = shares = torch.empty(numbers, dtype=torch.int32, device=step.tables.device)
            share_chunks[(1,)](
                shares, part.starts, part.offsets, part.rows.shape[0], window, *bounds.arguments,
                UNITS=triton.next_power_of_2(units), GROUP=group, QUERIES=queries, TILE=tile, num_warps=4,
            )  # fmt: skip
        return self._chunks[window]

    def _forget_but(self, step: DeviceStep) -> None:
        # Shares that were written before a capture would not be written in its graph.
        is_captured = step.tables.is_cuda and torch.cuda.is_current_stream_capturing()
        if step is not self._step or is_captured is not self._is_captured:
            self._step, self._is_captured, self._decodes, self._chunks = step, is_captured, {}, {}

    def _operand(self, query: Tensor, cache: LayerCache) -> tl.dtype:
        if self._is_interpreted:
            return tl.float32
        return tl.float16 if cache.scales is not None and query.dtype.itemsize == 2 else _OPERANDS[query.dtype]


def _tile(tile: int, dtype: torch.dtype) -> int:
    """Float32 takes twice the shared memory and no tensor core: half the tile."""
    return max(SMALLEST_DOT, tile // 2) if dtype == torch.float32 else tile


def _strides(query: Tensor, cache: LayerCache, tables: Tensor) -> tuple[int, ...]:
    keys = cache.keys
    assert keys.stride() == cache.values.stride()
    assert query.stride(2) == keys.stride(3) == tables.stride(1) == 1
    assert cache.scales is None or keys.is_contiguous(), "scales lie as their vectors do"
    return (*query.stride()[:2], *keys.stride()[:3], tables.stride(0))
