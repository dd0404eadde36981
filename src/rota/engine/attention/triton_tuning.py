"""A tuning is what the attention kernels were measured to be quick with: their shapes, and how finely work is cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from rota.engine.attention.triton_shares import Bounds
from rota.engine.layer_cache import LayerCache

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
    # See `Bounds`.
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


def bounds_of(tuning: DecodeTuning | PrefillTuning, device: torch.device, kv_heads: int, spare: int) -> Bounds:
    slots = slots_of(tuning.programs, tuning, device, kv_heads)
    return Bounds(slots, tuning.cuts, tuning.shortest, tuning.most_pieces, spare, tuning.fits)


def slots_of(programs: int, tuning: DecodeTuning | PrefillTuning, device: torch.device, kv_heads: int) -> int:
    """Programs of one kv head, if a processor has so many of all."""
    return max(1, (tuning.processors or _processors(device)) * programs // kv_heads)


def choose_programs(decodes: int, bounds: Bounds, resident: int) -> int:
    """Programs of one kv head: all that can run at once, or so many that uncut rows make full rounds."""
    if decodes <= resident:
        return min(resident, bounds.shares(decodes))
    rounds = -(-decodes // resident)
    return -(-decodes // rounds)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
