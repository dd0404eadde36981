"""The KV cache is the vault behind the block ledger: it holds keys and values, and knows only block numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rota.core.config import CacheConfig
from rota.core.errors import ConfigError
from rota.engine.device import DeviceMemory

GIBIBYTE, MEBIBYTE = 1 << 30, 1 << 20
# Shares of a device's memory for weights and KV; other programs need a CPU's memory too.
DEFAULT_FRACTION = {"cuda": 0.88, "cpu": 0.25}
# A cache that cannot hold a request of this many tokens is refused.
SENSIBLE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes that make up one block."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize


def count_blocks(
    config: CacheConfig, shape: CacheShape, memory: DeviceMemory, device: torch.device, context: int, rows: int
) -> int:
    """Blocks that the ledger may give away: the configured number, or as many as the memory share holds."""
    if config.kv_blocks is not None:
        _check_fits(config.kv_blocks, shape, memory, device)
        return config.kv_blocks
    fraction = config.mem_fraction_static or DEFAULT_FRACTION[device.type]
    room = int(fraction * memory.total) - memory.taken
    blocks = room // shape.block_bytes - 1  # one is scratch
    pages = -(-context // shape.block_size)
    needed = min(pages, -(-SENSIBLE_TOKENS // shape.block_size))
    if blocks < needed:
        raise ConfigError(
            f"The KV cache would hold {max(0, blocks) * shape.block_size} tokens, less than one request of "
            f"{needed * shape.block_size}: mem_fraction_static {fraction:g} of {_readable(memory.total)} is "
            f"{_readable(fraction * memory.total)}, {_readable(memory.taken)} of it are taken, and "
            f"{shape.block_size} tokens need {_readable(shape.block_bytes)}. Raise mem_fraction_static, free memory "
            f"on the {device.type}, or serve a smaller model."
        )
    if device.type == "cpu":
        blocks = min(blocks, rows * pages)
    return blocks


class KVCache:
    """Keys and values of every layer, [blocks + 1, kv_heads, block_size, head_dim]; the last block is scratch.

    Padding writes to the scratch block, so the ledger must never give it away.
    """

    def __init__(self, blocks: int, shape: CacheShape, device: torch.device) -> None:
        self.device = device
        self.dtype = shape.dtype
        self.scratch_block = blocks
        size = (blocks + 1, shape.kv_heads, shape.block_size, shape.head_dim)
        self.layers: list[tuple[Tensor, Tensor]] = [
            (_zeros(size, shape.dtype, device), _zeros(size, shape.dtype, device)) for _ in range(shape.layers)
        ]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since a masked weight of zero times a NaN would still be NaN."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # The system allocates the pages of NumPy's zeros at the first write: an idle cache costs nothing.
    raw = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)


def _check_fits(blocks: int, shape: CacheShape, memory: DeviceMemory, device: torch.device) -> None:
    wanted, free = (blocks + 1) * shape.block_bytes, memory.total - memory.taken
    if wanted > free:
        raise ConfigError(
            f"kv_blocks is {blocks}, which take {_readable(wanted)}, but of the {device.type}'s "
            f"{_readable(memory.total)} only {_readable(free)} are free; "
            f"{max(0, free // shape.block_bytes - 1)} blocks would fit."
        )


def _readable(size: float) -> str:
    return f"{size / GIBIBYTE:.3g} GiB" if size >= GIBIBYTE else f"{size / MEBIBYTE:.3g} MiB"
