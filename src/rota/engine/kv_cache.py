"""The KV cache is the vault behind the block ledger: it holds keys and values, and knows only block numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rota.core.config import CacheConfig
from rota.core.errors import ConfigError
from rota.engine.device import DeviceMemory, zeros
from rota.engine.layer_cache import EIGHT_BITS, LayerCache

GIBIBYTE, MEBIBYTE = 1 << 30, 1 << 20
# Shares of a device's memory for weights and KV; other programs need a CPU's memory too.
DEFAULT_FRACTION = {"cuda": 0.88, "cpu": 0.25}
# A cache that cannot hold a request of this many tokens is refused.
SENSIBLE_TOKENS = 512
# Of a GPU whose hardware converts numbers of eight bits; Triton has no such numbers below it.
SMALLEST_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes that make up one block."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def has_scales(self) -> bool:
        return self.dtype is EIGHT_BITS

    @property
    def block_bytes(self) -> int:
        """Keys and values of all layers, and their scales."""
        vector = self.head_dim * self.dtype.itemsize + (torch.float32.itemsize if self.has_scales else 0)
        return 2 * self.layers * self.kv_heads * self.block_size * vector


def choose_cache_dtype(config: CacheConfig, dtype: torch.dtype, backend: str, device: torch.device) -> torch.dtype:
    """The precision of keys and values for a model of this `dtype`, or a refusal if the kernels do not have it."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if backend == "flashinfer":
        raise ConfigError(
            "kv_cache_dtype is 'fp8', but Rota does not give FlashInfer keys and values in eight bits; use "
            "--attention-backend triton, or --kv-cache-dtype auto."
        )
    if backend == "triton" and (found := torch.cuda.get_device_capability(device)) < SMALLEST_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype is 'fp8', which needs a GPU of compute capability 8.9 or higher, but this one has "
            f"{found[0]}.{found[1]}; use --kv-cache-dtype auto."
        )
    return EIGHT_BITS


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
    """Keys and values of every layer, in blocks + 1 blocks; the last one is scratch.

    Padding writes to the scratch block, so the ledger must never give it away.
    """

    def __init__(self, blocks: int, shape: CacheShape, device: torch.device) -> None:
        self.device = device
        self.scratch_block = blocks
        self.layers = [_layer(blocks + 1, shape, device) for _ in range(shape.layers)]


def _layer(blocks: int, shape: CacheShape, device: torch.device) -> LayerCache:
    vectors = (blocks, shape.kv_heads, shape.block_size)
    # Zeros, since a masked weight of zero times a NaN would still be NaN.
    keys, values = (zeros((*vectors, shape.head_dim), shape.dtype, device) for _ in range(2))
    return LayerCache(keys, values, zeros((*vectors, 2), torch.float32, device) if shape.has_scales else None)


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
