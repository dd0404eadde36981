"""A paged cache over shuffled blocks, beside the sequences it holds and what attention makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rota.engine.layer_cache import LayerCache, from_eight_bits, in_eight_bits, in_eight_bits_together
from rota.engine.step.device_step import DeviceStep, PrefillPart, int32


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    keys: Tensor  # [blocks, kv_heads, block_size, head_dim]
    values: Tensor
    scales: Tensor | None = None  # if keys and values are in eight bits
    tables: Tensor  # [rows + 1, pages] int32
    # [tokens, kv_heads, head_dim] of each row, in float64
    dense_keys: tuple[Tensor, ...]
    dense_values: tuple[Tensor, ...]

    @property
    def layer(self) -> LayerCache:
        return LayerCache(self.keys, self.values, self.scales)


def paged_cache(
    lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str
) -> PagedCache:
    """Whatever no sequence wrote is NaN, so that reading it shows."""
    pages = [-(-length // block_size) for length in lengths]
    # One block that nobody owns; unused entries of the page tables point there.
    order = iter(torch.randperm(sum(pages)).tolist())
    nobody = sum(pages)
    keys, values = torch.full((2, nobody + 1, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    tables = torch.full((len(lengths) + 1, max(pages) + 3), nobody, dtype=torch.int32)
    dense: list[tuple[Tensor, Tensor]] = []
    for row, length in enumerate(lengths):
        k, v = torch.randn(2, length, kv_heads, head_dim).to(dtype)
        dense.append((k.double(), v.double()))
        for page in range(pages[row]):
            tables[row, page] = block = next(order)
            begin, end = page * block_size, min((page + 1) * block_size, length)
            keys[block, :, : end - begin] = k[begin:end].transpose(0, 1)
            values[block, :, : end - begin] = v[begin:end].transpose(0, 1)
    dense_keys, dense_values = zip(*dense, strict=True)
    return PagedCache(
        keys=keys.to(device),
        values=values.to(device),
        tables=tables.to(device),
        dense_keys=dense_keys,
        dense_values=dense_values,
    )


def as_computed(cache: PagedCache) -> PagedCache:
    return cache


def rounded(cache: PagedCache) -> PagedCache:
    """The same cache in eight bits, beside the sequences as they read then; what nobody wrote stays NaN.

    Both are rounded on the cache's device: another may divide a little differently, and choose the code beside.
    """
    keys, values, scales = in_eight_bits_together(cache.keys, cache.values)
    dense_keys, dense_values = (
        tuple(from_eight_bits(*in_eight_bits(row.to(keys.device)), torch.float64).cpu() for row in rows)
        for rows in (cache.dense_keys, cache.dense_values)
    )
    return replace(
        cache,
        keys=keys.contiguous(),
        values=values.contiguous(),
        scales=scales,
        dense_keys=dense_keys,
        dense_values=dense_values,
    )


def decode_step(cache: PagedCache, rows: list[int]) -> DeviceStep:
    """Each of `rows` attends to all it has; -1 is a padding row that attends to nothing."""
    lengths = [0 if row < 0 else cache.dense_keys[row].shape[0] for row in rows]
    return _step(cache, rows, lengths, None)


def prefill_step(cache: PagedCache, chunks: list[tuple[int, int, int]]) -> DeviceStep:
    """Chunks are (row, start, length)."""
    rows, starts, lengths = zip(*chunks, strict=True)
    device = str(cache.keys.device)
    offsets = [sum(lengths[:chunk]) for chunk in range(len(chunks) + 1)]
    part = PrefillPart(
        rows=int32(rows, device),
        starts=int32(starts, device),
        offsets=int32(offsets, device),
        longest=max(lengths),
        host_rows=rows,
        host_starts=starts,
        host_lengths=lengths,
    )
    return _step(cache, [], [], part)


def _step(cache: PagedCache, rows: list[int], lengths: list[int], part: PrefillPart | None) -> DeviceStep:
    device = str(cache.keys.device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)  # attention reads none of these
    return DeviceStep(
        token_ids=nothing,
        positions=nothing,
        addresses=nothing,
        tables=cache.tables,
        decode_rows=int32([row % cache.tables.shape[0] for row in rows], device),
        decode_lengths=int32(lengths, device),
        prefill=part,
    )


def without_left(cache: PagedCache, before: list[int]) -> PagedCache:
    """The cache after each row's pages that lie wholly before a position were given back, and belong to nobody."""
    tables, block_size = cache.tables.clone(), cache.keys.shape[2]
    for row, position in enumerate(before):
        tables[row, : max(0, position) // block_size] = cache.keys.shape[0] - 1
    return replace(cache, tables=tables)


def attend(query: Tensor, cache: PagedCache, row: int, start: int, scale: float, window: int = 0) -> Tensor:
    """Causal softmax attention in float64 of query [tokens, heads, head_dim], its first token at position `start`."""
    tokens, heads, _ = query.shape
    group = heads // cache.dense_keys[row].shape[1]
    k = cache.dense_keys[row].repeat_interleave(group, 1)
    v = cache.dense_values[row].repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query.double().cpu(), k) * scale
    own = start + torch.arange(tokens)
    position = torch.arange(k.shape[0])[None, :]
    logits.masked_fill_(position > own[:, None], float("-inf"))
    if window:
        logits.masked_fill_(position <= own[:, None] - window, float("-inf"))
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
