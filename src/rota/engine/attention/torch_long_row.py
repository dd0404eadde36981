"""A long row is read once, a few pieces at a time: each is gathered, and attended to while the cache still has it.

row's tokens   0 ..... low ................................... high
pieces               | rest | piece | piece | piece | piece | rest |
calls                |  1   |       2       |       3       |  4   |      as many pieces as keep all threads busy
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rota.engine.layer_cache import LayerCache, from_eight_bits

# Tokens. 64k tokens of SmolLM2's heads on one core: 17.6 ms in pieces of 1,024 and 40.4 ms at once; of 512 and 2,048,
# 27.9 and 39.0 ms (torch 2.13, 2026-11-15, not quiet).
PIECE = 1024
LONG = 2 * PIECE


@dataclass(frozen=True, slots=True)
class _Call:
    pages: Tensor  # [pieces * kv_heads * pages], lines of the cache
    pieces: int
    begin: int  # tokens of each piece that are seen
    end: int


@dataclass(frozen=True, slots=True)
class LongRow:
    """One decoding row."""

    member: int  # its place among the decodes
    calls: list[_Call]

    def attend(self, query: Tensor, cache: LayerCache, scale: float) -> Tensor:
        """[heads, head_dim] of query [heads, head_dim]."""
        kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
        grouped = query.reshape(1, kv_heads, -1, head_dim)
        parts, logs = [], []
        for call in self.calls:
            keys, values = gather(cache, call.pages, call.pieces, query.dtype)
            # What torch's attention calls on a CPU; here it also gives the softmax's denominators.
            part, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                grouped.expand(call.pieces, -1, -1, -1),
                keys[:, :, call.begin : call.end],
                values[:, :, call.begin : call.end],
                scale=scale,
            )
            parts.append(part)
            logs.append(log)
        weights = torch.cat(logs).float().softmax(0)  # [pieces, kv_heads, heads / kv_heads]
        mixed = (torch.cat(parts).float() * weights[..., None]).sum(0)
        return mixed.to(query.dtype).reshape(query.shape)


def long_row(member: int, table: Tensor, low: int, high: int, keys: Tensor) -> LongRow:
    """Prepare the tokens [low, high) of a row with this page table."""
    at_once = -(-torch.get_num_threads() // keys.shape[1])
    return LongRow(member, list(_calls(table, low, high, keys, at_once)))


def _calls(table: Tensor, low: int, high: int, keys: Tensor, at_once: int) -> Iterator[_Call]:
    block_size = keys.shape[2]
    pages = -(-PIECE // block_size)
    piece = pages * block_size
    first = low // block_size
    if low % block_size:
        seen = min(piece, high - first * block_size)
        last = first + -(-seen // block_size)
        yield _Call(lines(table[None, first:last], keys), 1, low % block_size, seen)
        first = last
    whole = (high - first * block_size) // piece
    for begin in range(0, whole, at_once):
        count = min(at_once, whole - begin)
        some = table[first + begin * pages : first + (begin + count) * pages]
        yield _Call(lines(some.view(count, pages), keys), count, 0, piece)
    first += whole * pages
    if first * block_size < high:
        yield _Call(lines(table[None, first : -(-high // block_size)], keys), 1, 0, high - first * block_size)


def gather(cache: LayerCache, pages: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, kv_heads, tokens, head_dim] of `dtype`, copied page by page."""
    keys, values = _gathered(cache.keys, pages, rows), _gathered(cache.values, pages, rows)
    if cache.scales is None:
        return keys, values
    scales = cache.scales.flatten(0, 1).index_select(0, pages).view(*keys.shape[:-1], 2)
    return from_eight_bits(keys, scales[..., 0], dtype), from_eight_bits(values, scales[..., 1], dtype)


def _gathered(cache: Tensor, pages: Tensor, rows: int) -> Tensor:
    blocks, kv_heads, block_size, head_dim = cache.shape
    # In words of 8 bytes: torch wakes its other threads by the number of elements, too early for these small copies
    # (8 instead of 16 µs for 200 tokens of SmolLM2).
    words = cache.view(blocks * kv_heads, block_size * head_dim).view(torch.int64)
    return words.index_select(0, pages).view(cache.dtype).view(rows, kv_heads, -1, head_dim)


def lines(tables: Tensor, keys: Tensor) -> Tensor:
    """Page tables [rows, pages] as lines of the cache, head by head: [rows * kv_heads * pages]."""
    heads = torch.arange(keys.shape[1], device=keys.device)
    return (tables[:, None, :] * keys.shape[1] + heads[:, None]).flatten()
