"""A step's tokens are grouped by slot on the host, into tiles; each program of a kernel takes one tile.

    token_slots   2 0 2 B 0 2          B: base, which has the number one past the last slot
    order         1 4 0 2 5 3          the tokens of slot 0, of slot 2, of base
    tiles of 2    [1 4] [0 2] [5]

Unused tiles follow. Sizes alone decide how many, so that a captured graph launches the same programs every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rota.engine.device import send
from rota.engine.step.device_step import Groups, LoraBatch
from rota.engine.step.frames import FrameLayout, Numbers

# In a decode step each slot has few tokens, and a matrix instruction takes at least 16; a prompt fills large tiles.
DECODE_TILE = 16
PREFILL_TILE = 64
# 64 decodes of six adapters and a prompt of 256 tokens, Llama-8B on an H200 (2026-11-15): 1.7 ms a step in small tiles,
# 2.1 ms in large tiles.
MOST_IN_SMALL_TILES = 512


def tile_size_for(tokens: int) -> int:
    return DECODE_TILE if tokens <= MOST_IN_SMALL_TILES else PREFILL_TILE


def most_tiles(tokens: int, slots: int, tile_size: int) -> int:
    """The most tiles that the tokens can need: the last tile of each slot may hold one token."""
    used = min(tokens, slots)
    return used + (tokens - used) // tile_size


def tile_table(
    token_slots: Numbers, slots: int, tile_size: int, tiles: int | None = None
) -> tuple[dict[str, Numbers], Groups]:
    """The arrays of a LoraBatch, by name: tokens grouped by slot, and each group cut into tiles; unused ones fill up
    to `tiles`."""
    # NumPy sorts two-byte numbers by counting, in linear time.
    order = token_slots.astype(np.int16).argsort(kind="stable")
    counts = np.bincount(token_slots, minlength=slots + 1)[:slots]
    ends = counts.cumsum()
    starts = ends - counts
    tiles_of_slot = -(-counts // tile_size)
    tiles_before = tiles_of_slot.cumsum() - tiles_of_slot

    tile_slots = np.arange(slots).repeat(tiles_of_slot)
    used = len(tile_slots)
    tiles = used if tiles is None else tiles
    assert used <= tiles, "more tiles are needed than there is room for"
    nth_of_slot = np.arange(used) - tiles_before[tile_slots]
    table = {name: np.zeros(tiles, np.int32) for name in ("tile_slots", "tile_starts", "tile_counts")}
    table["tile_slots"][:used] = tile_slots
    table["tile_starts"][:used] = first = starts[tile_slots] + nth_of_slot * tile_size
    table["tile_counts"][:used] = np.minimum(tile_size, ends[tile_slots] - first)

    present = counts.nonzero()[0]
    groups = tuple(zip(present.tolist(), starts[present].tolist(), ends[present].tolist(), strict=True))
    return {"token_slots": token_slots, "order": order.astype(np.int32), **table}, groups


@dataclass(frozen=True, slots=True)
class BatchFrame:
    """The sizes of a batch: it travels as one array, and a captured graph always finds it in one place."""

    tokens: int
    slots: int
    tile_size: int

    @property
    def tiles(self) -> int:
        return most_tiles(self.tokens, self.slots, self.tile_size)

    @property
    def layout(self) -> FrameLayout:
        """How the batch lies in the array."""
        tokens, tiles = self.tokens, self.tiles
        return FrameLayout(
            {"token_slots": tokens, "order": tokens, "tile_slots": tiles, "tile_starts": tiles, "tile_counts": tiles}
        )

    def pack(self, token_slots: Numbers) -> tuple[Numbers, Groups]:
        """The array for these tokens; base tokens fill up the frame."""
        padded = np.full(self.tokens, self.slots, np.int32)
        padded[: len(token_slots)] = token_slots
        sections, groups = tile_table(padded, self.slots, self.tile_size, self.tiles)
        return self.layout.pack(sections, padding={}), groups

    def unpack(self, line: Tensor, groups: Groups = ()) -> LoraBatch:
        """The batch in a packed array's copy on the device; it shares the copy's memory."""
        return LoraBatch(**self.layout.unpack(line), tile_size=self.tile_size, groups=groups)


def make_batch(token_slots: Numbers, slots: int, device: torch.device, tile_size: int | None = None) -> LoraBatch:
    """The batch of one step, sent to the device without waiting; base tokens have the value `slots`."""
    frame = BatchFrame(len(token_slots), slots, tile_size or tile_size_for(len(token_slots)))
    line, groups = frame.pack(token_slots)
    return frame.unpack(send(line, device), groups)
