"""A tuning is what the attention kernels were measured to be quick with: their shapes, and how finely work is cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from rota.engine.attention.triton_shares import Bounds
from rota.engine.layer_cache import LayerCache


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """`benchmarks/kernels.py --sweep` compares shapes, `benchmarks/long_rows.py --only sweep` the rest."""

    tile: int = 32  # tokens per iteration
    warps: int = 2
    stages: int = 3
    registers: int = 168  # of a thread, at most: six programs run at once on a processor
    # Programs of the grid per processor. With six, processors get unequal numbers: 142 instead of 127 us at 64 x 2,000.
    resident: int = 5
    apart: int = 8  # decodes of a step up to which a kernel of its own combines: 6.8 instead of 9.2 us at 1 x 600
    # See `Bounds`.
    programs: int = 4  # to run at once on a processor: enough to keep its share of the memory bus busy
    cuts: int = 2
    shortest: int = 320
    most_pieces: int = 64
    spare: int = 256
    spare_of_few: int = 64  # where a kernel of its own combines
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


# Of codes in eight bits, by counts in the compiler's output for an H200: 64 tokens take a warp 1,000 instructions with
# these registers, and 32 at a time 1,276; in 16 bits they take 1,062, and twice the time to be read.
EIGHT_BIT_DECODES = DecodeTuning(tile=64, registers=200)


def decode_tuning_for(cache: LayerCache) -> DecodeTuning:
    return DecodeTuning() if cache.scales is None else EIGHT_BIT_DECODES


def bounds_of(tuning: DecodeTuning | PrefillTuning, device: torch.device, kv_heads: int, spare: int) -> Bounds:
    slots = slots_of(tuning.programs, tuning, device, kv_heads)
    return Bounds(slots, tuning.cuts, tuning.shortest, tuning.most_pieces, spare)


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
