"""TorchAttention attends in plain torch: the way of CPUs, and what the kernels are tested against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.layer_cache import LayerCache, from_eight_bits
from rota.engine.padding import pad_rows, padded_rows
from rota.engine.step.device_step import DeviceStep

# ── torch long row ──────────────────────────────────────────────────────────────────────────────────────────────────
# A long row is read once, a few pieces at a time: each is gathered, and attended to while the cache still has it.
#
# row's tokens   0 ..... low ................................... high
# pieces               | rest | piece | piece | piece | piece | rest |
# calls                |  1   |       2       |       3       |  4   |      as many pieces as keep all threads busy

# Tokens. 64k tokens of SmolLM2's heads on one core: 17.6 ms in pieces of 1,024 and 40.4 ms at once; of 512 and 2,048,
# 27.9 and 39.0 ms (torch 2.13, 2026-11-15, not quiet).
PIECE = 1024
LONG = 2 * PIECE  # rows of more tokens are read so


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    pages: Tensor  # [pieces * kv_heads * pages], lines of the cache
    pieces: int
    begin: int  # tokens of each piece that are seen
    end: int


@dataclass(frozen=True, slots=True)
class LongRow:
    """One decoding row."""

    member: int  # its place among the decodes
    calls: list[_AttentionCall]

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


def _calls(table: Tensor, low: int, high: int, keys: Tensor) -> Iterator[_AttentionCall]:
    """For the tokens [low, high) of a row with this page table."""
    at_once, block_size = -(-torch.get_num_threads() // keys.shape[1]), keys.shape[2]
    pages = -(-PIECE // block_size)
    piece = pages * block_size
    first = low // block_size
    if low % block_size:
        seen = min(piece, high - first * block_size)
        last = first + -(-seen // block_size)
        yield _AttentionCall(lines(table[None, first:last], keys), 1, low % block_size, seen)
        first = last
    whole = (high - first * block_size) // piece
    for begin in range(0, whole, at_once):
        count = min(at_once, whole - begin)
        some = table[first + begin * pages : first + (begin + count) * pages]
        yield _AttentionCall(lines(some.view(count, pages), keys), count, 0, piece)
    first += whole * pages
    if first * block_size < high:
        yield _AttentionCall(lines(table[None, first : -(-high // block_size)], keys), 1, 0, high - first * block_size)


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


# Rows of different lengths share a call until padding them costs more than another call: by estimate 60 µs a call and
# 0.08 µs a padded token, from single calls with SmolLM2's heads in bf16 on two cores; other values were not tried.
PADDING_PER_CALL = 1024


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decoding rows that one call attends for."""

    members: Tensor  # [members], their places among the decodes
    pages: Tensor  # [members * kv_heads * pages], lines of block_size * head_dim numbers in the cache
    longest: int  # tokens from the first page on
    mask: Tensor | None  # [members, 1, 1, longest], added to the scores; None: all are seen


@dataclass(frozen=True, slots=True)
class _PromptChunk:
    """A chunk's queries, its sequence's pages so far, and what it must not see."""

    begin: int
    end: int
    pages: Tensor  # [kv_heads * pages]
    padded: int  # tokens attended to, cached prefix included, and masked tokens behind them
    mask: Tensor | None  # [padded tokens, padded], added to the scores; None: plainly causal


@dataclass(frozen=True, slots=True)
class _Decodes:
    groups: list[_DecodeGroup]
    long_rows: list[LongRow]


class TorchAttention:
    """Gathers the pages of a sequence, then lets torch attend. What is gathered beyond its end is hidden by a mask,
    which works as long as it is finite: see `storable` in ops/reference.py.

    What the layers of a step share is prepared once, with lengths read on the host: not for CUDA graphs. The newest
    step is known by identity, so its tensors must not change under way.
    """

    def __init__(self, scale: float, padding_per_call: int = PADDING_PER_CALL) -> None:
        self._scale = scale
        self._padding_per_call = padding_per_call
        self._step: DeviceStep | None = None
        self._decodes: dict[int, _Decodes] = {}  # by window
        self._chunks: dict[int, list[_PromptChunk]] = {}

    def decode(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor:
        self._forget_but(step)
        if window not in self._decodes:
            self._decodes[window] = _prepare(step, cache.keys, query.dtype, self._padding_per_call, window)
        decodes = self._decodes[window]
        if len(decodes.groups) == 1 and not decodes.long_rows:
            return self._decode_group(query, cache, decodes.groups[0])
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in decodes.groups:
            attended = self._decode_group(query[group.members], cache, group)
            output.index_copy_(0, group.members, attended)
        for row in decodes.long_rows:
            output[row.member] = row.attend(query[row.member], cache, self._scale)
        return output

    def _decode_group(self, query: Tensor, cache: LayerCache, group: _DecodeGroup) -> Tensor:
        rows, heads, head_dim = query.shape
        kv_heads = cache.keys.shape[1]
        keys, values = gather(cache, group.pages, rows, query.dtype)
        # The heads that share keys stand where a prompt's tokens would: [rows, kv_heads, heads / kv_heads, head_dim].
        attended = functional.scaled_dot_product_attention(
            query.reshape(rows, kv_heads, heads // kv_heads, head_dim),
            keys[:, :, : group.longest],
            values[:, :, : group.longest],
            attn_mask=group.mask,
            scale=self._scale,
        )
        return attended.reshape(rows, heads, head_dim)

    def prefill(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor:
        self._forget_but(step)
        if window not in self._chunks:
            self._chunks[window] = list(_chunks(step, cache.keys, query.dtype, window))
        chunks = self._chunks[window]
        parts = [self._prefill_chunk(query[chunk.begin : chunk.end], cache, chunk) for chunk in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill_chunk(self, query: Tensor, cache: LayerCache, chunk: _PromptChunk) -> Tensor:
        keys, values = gather(cache, chunk.pages, 1, query.dtype)
        attended = functional.scaled_dot_product_attention(
            pad_rows(query).transpose(0, 1)[None],
            keys[:, :, : chunk.padded],
            values[:, :, : chunk.padded],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)[: len(query)]

    def _forget_but(self, step: DeviceStep) -> None:
        if step is not self._step:
            self._step, self._decodes, self._chunks = step, {}, {}


def _prepare(step: DeviceStep, keys: Tensor, dtype: torch.dtype, padding: int, window: int) -> _Decodes:
    """Short rows in groups; long rows each alone, on a CPU: padding others to them would take longest."""
    lengths: list[int] = step.decode_lengths.tolist()
    lows = [max(0, length - window) if window else 0 for length in lengths]
    is_long = [keys.device.type == "cpu" and high - low > LONG for low, high in zip(lows, lengths, strict=True)]
    rows: list[int] = step.decode_rows.tolist()
    long_rows = [
        LongRow(place, list(_calls(step.tables[rows[place]], lows[place], lengths[place], keys)))
        for place, alone in enumerate(is_long)
        if alone
    ]
    short = [place for place, alone in enumerate(is_long) if not alone]
    return _Decodes(list(_groups(step, keys, dtype, padding, short, lows, lengths)), long_rows)


def _groups(
    step: DeviceStep,
    keys: Tensor,
    dtype: torch.dtype,
    padding: int,
    short: list[int],
    lows: list[int],
    highs: list[int],
) -> Iterator[_DecodeGroup]:
    """Rows are gathered from the page on in which their windows begin."""
    block_size, device = keys.shape[2], keys.device
    pages = [low // block_size for low in lows]
    spans = [highs[place] - pages[place] * block_size for place in short]
    for batch in split_by_length(spans, padding):
        places = [short[each] for each in batch]
        longest = max(spans[each] for each in batch)
        members = torch.tensor(places, device=device)
        first = torch.tensor([pages[place] for place in places], device=device)[:, None]
        last = step.tables.shape[1] - 1  # the last page again where another row needs more of them
        page = (first + torch.arange(-(-longest // block_size), device=device)).clamp_(max=last)
        tables = step.tables[step.decode_rows[members].long()[:, None], page]
        mask = None
        if any(highs[place] - lows[place] != longest for place in places):
            position = first * block_size + torch.arange(longest, device=device)
            low, high = (torch.tensor([ends[place] for place in places], device=device) for ends in (lows, highs))
            hidden = (position >= high[:, None]) | (position < low[:, None])
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
            mask = mask[:, None, None, :]
        yield _DecodeGroup(members, lines(tables, keys), longest, mask)


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


def _chunks(step: DeviceStep, keys: Tensor, dtype: torch.dtype, window: int) -> Iterator[_PromptChunk]:
    assert step.prefill is not None
    begin, block_size = 0, keys.shape[2]
    for row, start, tokens in zip(
        step.prefill.host_rows, step.prefill.host_starts, step.prefill.host_lengths, strict=True
    ):
        length = start + tokens
        first = max(0, start - window + 1) // block_size if window else 0
        padded = padded_rows(length - first * block_size)
        # The last page again where the padding needs more of them.
        page = (first + torch.arange(-(-padded // block_size))).clamp_(max=(length - 1) // block_size)
        mask = None
        if start > 0 or 0 < window < length:
            # Padded queries see what the last one does: one that saw nothing would be NaN.
            own = start + torch.arange(padded_rows(tokens)).clamp_(max=tokens - 1)[:, None]
            position = first * block_size + torch.arange(padded)
            hidden = position > own
            if window:
                hidden |= position <= own - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(keys.device)
        pages = lines(step.tables[row : row + 1, page.to(keys.device)], keys)
        yield _PromptChunk(begin, begin + tokens, pages, padded, mask)
        begin += tokens
