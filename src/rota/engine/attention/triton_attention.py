"""TritonAttention runs paged attention as Triton kernels, with launches that depend on nothing inside a tensor.

What varies from step to step (lengths, rows, page tables) is read on the device, so a captured CUDA graph stays
right when it is replayed with other lengths than it was captured with.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.attention.triton_decode import combine_kernel, decode_kernel
from rota.engine.attention.triton_prefill import prefill_kernel
from rota.engine.step.device_step import DeviceStep

# The smallest number of rows a matrix instruction takes.
SMALLEST_DOT = 16
# Float32 multiplies without tensor cores, every operand in registers: 32 queries are what fits.
LARGEST_FLOAT32_BLOCK = 32
_OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Shapes of the decode kernel; `benchmarks/kernels.py --sweep` compares them."""

    tile: int = 32  # tokens per iteration
    warps: int = 2
    stages: int = 3
    # Programs to aim for per processor: enough to keep its share of the memory bus busy.
    programs: int = 4
    most_splits: int = 64
    splits: int | None = None  # None: chosen from batch, length bound and processors


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Shapes of the prefill kernel."""

    queries: int = 128  # packed (token, head) rows per program
    tile: int = 64  # keys per iteration
    warps: int = 8
    stages: int = 3


class TritonAttention:
    """Paged attention for GPUs, or for a CPU under Triton's interpreter (TRITON_INTERPRET=1)."""

    def __init__(
        self,
        scale: float,
        decode_tuning: DecodeTuning | None = None,
        prefill_tuning: PrefillTuning | None = None,
    ) -> None:
        self._scale = scale * math.log2(math.e)
        self._decode_tuning = decode_tuning or DecodeTuning()
        self._prefill_tuning = prefill_tuning or PrefillTuning()
        # The interpreter keeps bfloat16 as integers and multiplies those; it is right only in float32.
        self._is_interpreted = triton.knobs.runtime.interpret

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, step: DeviceStep) -> Tensor:
        assert query.shape[0] == step.decodes
        tuning = self._decode_tuning
        decodes, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        tile = _tile(tuning.tile, keys)
        splits = tuning.splits or choose_splits(
            decodes * kv_heads,
            step.longest_decode,
            tile,
            _processors(query.device) * tuning.programs,
            tuning.most_splits,
        )
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if splits == 1:
            partial, logs = output, output
        else:
            partial = torch.empty(decodes, heads, splits, head_dim, dtype=torch.float32, device=query.device)
            logs = torch.empty(decodes, heads, splits, dtype=torch.float32, device=query.device)
        dims = triton.next_power_of_2(head_dim)
        group = heads // kv_heads
        decode_kernel[(kv_heads, decodes, splits)](
            query, keys, values, step.tables, step.decode_rows, step.decode_lengths, partial, logs,
            self._scale, splits, *_strides(query, keys, values, step.tables),
            HEADS=heads, GROUP=group, GROUP_TILE=max(SMALLEST_DOT, triton.next_power_of_2(group)),
            HEAD_DIM=head_dim, DIMS=dims, BLOCK_SIZE=keys.shape[2], TILE=tile, SPLIT=splits > 1,
            OPERAND=self._operand(keys), num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        if splits > 1:
            combine_kernel[(heads, decodes)](
                partial, logs, step.decode_lengths, output, splits, HEADS=heads, HEAD_DIM=head_dim, DIMS=dims,
                SPLITS=triton.next_power_of_2(splits), TILE=tile, num_warps=4,
            )  # fmt: skip
        return output

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, step: DeviceStep) -> Tensor:
        assert step.prefill is not None
        part, tuning = step.prefill, self._prefill_tuning
        _, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        queries = min(tuning.queries, LARGEST_FLOAT32_BLOCK) if keys.dtype == torch.float32 else tuning.queries
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        grid = (kv_heads, part.rows.shape[0], triton.cdiv(part.longest * group, queries))
        prefill_kernel[grid](
            query, keys, values, step.tables, part.rows, part.starts, part.offsets, output,
            self._scale, *_strides(query, keys, values, step.tables),
            HEADS=heads, GROUP=group, HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=keys.shape[2], QUERIES=queries, TILE=_tile(tuning.tile, keys), OPERAND=self._operand(keys),
            num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        return output

    def _operand(self, cache: Tensor) -> tl.dtype:
        return tl.float32 if self._is_interpreted else _OPERANDS[cache.dtype]


def choose_splits(programs: int, longest: int, tile: int, wanted: int, most: int) -> int:
    """How many shares to cut each row into, so that about `wanted` programs run; no share below one tile."""
    tiles = -(-longest // tile)
    return max(1, min(round(wanted / max(programs, 1)), tiles, most))


def _tile(tile: int, cache: Tensor) -> int:
    """Float32 takes twice the shared memory and no tensor core: half the tile."""
    return tile // 2 if cache.dtype == torch.float32 else tile


def _strides(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor) -> tuple[int, ...]:
    assert keys.stride() == values.stride()
    assert query.stride(2) == keys.stride(3) == tables.stride(1) == 1
    return (*query.stride()[:2], *keys.stride()[:3], tables.stride(0))


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
