"""TorchAttention attends in plain torch: the way of CPUs, and what the kernels are tested against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.padding import pad_rows, padded_rows
from rota.engine.step.device_step import DeviceStep

# Rows of different lengths share a call until padding them costs more than another call: by estimate 60 µs a call and
# 0.08 µs a padded token, from single calls with SmolLM2's heads in bf16 on two cores; other values were not tried.
PADDING_PER_CALL = 1024


@dataclass(frozen=True, slots=True)
class _Group:
    """Decoding rows that one call attends for."""

    members: Tensor  # [members], their places among the decodes
    pages: Tensor  # [members * kv_heads * pages], lines of block_size * head_dim numbers in the cache
    longest: int
    mask: Tensor | None  # [members, 1, 1, longest], added to the scores; None: all are equally long


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk's queries, its sequence's pages so far, and what it must not see."""

    begin: int
    end: int
    pages: Tensor  # [kv_heads * pages]
    padded: int  # tokens attended to, cached prefix included, and masked tokens behind them
    mask: Tensor | None  # [padded tokens, padded], added to the scores where a prefix is cached; None: plainly causal


class TorchAttention:
    """Gathers the pages of a sequence, then lets torch attend. What is gathered beyond its end is hidden by a mask,
    which works as long as it is finite: see `storable` in ops/reference.py.

    What the layers of a step share is prepared once, with lengths read on the host: not for CUDA graphs. The newest
    step is known by identity, so its tensors must not change under way.
    """

    def __init__(self, scale: float, padding_per_call: int = PADDING_PER_CALL) -> None:
        self._scale = scale
        self._padding_per_call = padding_per_call
        self._decode_step: DeviceStep | None = None
        self._prefill_step: DeviceStep | None = None
        self._groups: list[_Group] = []
        self._chunks: list[_Chunk] = []

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, step: DeviceStep) -> Tensor:
        if step is not self._decode_step:
            self._groups = list(_groups(step, keys, query.dtype, self._padding_per_call))
            self._decode_step = step
        if len(self._groups) == 1:
            return self._decode_group(query, keys, values, self._groups[0])
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._groups:
            attended = self._decode_group(query[group.members], keys, values, group)
            output.index_copy_(0, group.members, attended)
        return output

    def _decode_group(self, query: Tensor, keys: Tensor, values: Tensor, group: _Group) -> Tensor:
        rows, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        # The heads that share keys stand where a prompt's tokens would: [rows, kv_heads, heads / kv_heads, head_dim].
        attended = functional.scaled_dot_product_attention(
            query.reshape(rows, kv_heads, heads // kv_heads, head_dim),
            _gather(keys, group.pages, rows)[:, :, : group.longest],
            _gather(values, group.pages, rows)[:, :, : group.longest],
            attn_mask=group.mask,
            scale=self._scale,
        )
        return attended.reshape(rows, heads, head_dim)

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, step: DeviceStep) -> Tensor:
        if step is not self._prefill_step:
            self._chunks, self._prefill_step = list(_chunks(step, keys, query.dtype)), step
        parts = [self._prefill_chunk(query[chunk.begin : chunk.end], keys, values, chunk) for chunk in self._chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill_chunk(self, query: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk) -> Tensor:
        attended = functional.scaled_dot_product_attention(
            pad_rows(query).transpose(0, 1)[None],
            _gather(keys, chunk.pages, 1)[:, :, : chunk.padded],
            _gather(values, chunk.pages, 1)[:, :, : chunk.padded],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)[: len(query)]


def _gather(cache: Tensor, pages: Tensor, rows: int) -> Tensor:
    """[rows, kv_heads, tokens, head_dim], copied page by page."""
    blocks, kv_heads, block_size, head_dim = cache.shape
    # In words of 8 bytes: torch wakes its other threads by the number of elements, too early for these small copies
    # (8 instead of 16 µs for 200 tokens of SmolLM2).
    words = cache.view(blocks * kv_heads, block_size * head_dim).view(torch.int64)
    return words.index_select(0, pages).view(cache.dtype).view(rows, kv_heads, -1, head_dim)


def _pages(tables: Tensor, keys: Tensor) -> Tensor:
    """Page tables [rows, pages] as lines of the cache, head by head: [rows * kv_heads * pages]."""
    heads = torch.arange(keys.shape[1], device=keys.device)
    return (tables[:, None, :] * keys.shape[1] + heads[:, None]).flatten()


def _groups(step: DeviceStep, keys: Tensor, dtype: torch.dtype, padding: int) -> Iterator[_Group]:
    lengths = step.decode_lengths.tolist()
    block_size = keys.shape[2]
    for batch in split_by_length(lengths, padding):
        members = torch.tensor(batch, device=keys.device)
        longest = max(lengths[member] for member in batch)
        tables = step.tables[step.decode_rows[members].long(), : -(-longest // block_size)]
        mask = None
        if any(lengths[member] != longest for member in batch):
            hidden = torch.arange(longest, device=keys.device) >= step.decode_lengths[members, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
            mask = mask[:, None, None, :]
        yield _Group(members, _pages(tables, keys), longest, mask)


def split_by_length(lengths: list[int], most_padding: int) -> list[list[int]]:
    """Batches of places in `lengths`, the longest first, none of which needs more padding than `most_padding`."""
    batches: list[list[int]] = []
    longest = padding = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        padding += longest - lengths[place]
        if not batches or padding > most_padding:
            batches.append([])
            longest, padding = lengths[place], 0
        batches[-1].append(place)
    return [sorted(batch) for batch in batches]


def _chunks(step: DeviceStep, keys: Tensor, dtype: torch.dtype) -> Iterator[_Chunk]:
    assert step.prefill is not None
    begin, block_size = 0, keys.shape[2]
    for row, start, tokens in zip(
        step.prefill.host_rows, step.prefill.host_starts, step.prefill.host_lengths, strict=True
    ):
        length = start + tokens
        padded = padded_rows(length)
        # The last page again where the padding needs more of them.
        page = torch.arange(-(-padded // block_size)).clamp_(max=(length - 1) // block_size)
        mask = None
        if start > 0:
            shape = (padded_rows(tokens), padded)
            mask = torch.full(shape, -torch.inf, dtype=dtype, device=keys.device).triu_(start + 1)
        pages = _pages(step.tables[row : row + 1, page.to(keys.device)], keys)
        yield _Chunk(begin, begin + tokens, pages, padded, mask)
        begin += tokens
