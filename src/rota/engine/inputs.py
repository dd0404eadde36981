"""Rows remember what plans said of them, so a step sends the device only what is new.

    on the device   page tables, and each row's newest token: sampled there, read there by the next decode
    on the host     each row's known tokens and how many of them the cache holds once all submitted steps are done

Everything a step brings travels as one array of int32 in one copy, section after section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.ids import Row
from rota.core.plan import Chunk, Grant, Seat, StepPlan
from rota.engine.device import send
from rota.engine.frames import MixedFrame
from rota.engine.lora.layout import LoraBatch
from rota.engine.step import ChunkInputs, DeviceStep, PrefillPart

Numbers = NDArray[np.int32]
NONE: Numbers = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A plan on the device; the rows that sample come in the order of the result: decodes, then chunks."""

    rows: Tensor  # [sampled] int32
    lengths: Tensor  # [sampled] int32, tokens known: what a decode attends to, and the index of the token to come
    host_rows: NDArray[np.int64]  # [sampled]
    decodes: int
    longest_decode: int
    chunks: ChunkInputs | None

    @property
    def host_token_rows(self) -> NDArray[np.int64]:
        """[tokens] each token's row, decodes first."""
        rows = self.host_rows[: self.decodes]
        if self.chunks is None:
            return rows
        part = self.chunks.part
        return np.concatenate([rows, np.repeat(np.array(part.host_rows, np.int64), part.host_lengths)])


class Rows:
    """What every row was told; one more row, the last, is padding's and sees only the scratch block."""

    def __init__(self, rows: int, pages: int, block_size: int, scratch_block: int, device: torch.device) -> None:
        self._device = device
        self._padding = rows
        self._pages = pages
        self._block_size = block_size
        self._scratch_block = scratch_block
        self.tables = torch.full((rows + 1, pages), scratch_block, dtype=torch.int32, device=device)
        self.newest_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._tokens: list[Numbers] = [NONE] * rows
        self._held = [0] * rows  # blocks in its page table
        self._computed: NDArray[np.int32] = np.zeros(rows, np.int32)

    def accept(self, plan: StepPlan) -> Inputs:
        """Take down what the plan says and send it off."""
        places, blocks = self._page_changes(plan.seats, plan.grants)
        decodes = np.array(plan.decodes, np.int64)
        self._computed[decodes] += 1
        longest = int(self._computed[decodes].max(initial=0))
        chunk_sections = self._chunk_sections(plan.chunks, len(decodes)) if plan.chunks else ()
        host_rows = np.array(plan.sampled_rows, np.int64) if plan.chunks else decodes
        sections = [host_rows.astype(np.int32), self._computed[host_rows], places, blocks, *chunk_sections]
        sent = send(np.concatenate(sections), self._device)
        rows, lengths, places_sent, blocks_sent, *chunk_parts = torch.split(sent, [len(each) for each in sections])
        if len(places):
            self.write_pages(places_sent, blocks_sent)
        chunks = _chunk_inputs(plan.chunks, *chunk_parts) if plan.chunks else None
        return Inputs(rows, lengths, host_rows, len(decodes), longest, chunks)

    def accept_decodes(self, plan: StepPlan, width: int) -> Numbers:
        """[4, width]: rows, lengths, and where page tables change to what, of a plan that only decodes and grants.

        For a graph, whose tensors cannot move or grow: it stays on the host, and is padded. Padding sees one token of
        the scratch block, and writes the scratch block into its own page table.
        """
        count, granted = len(plan.decodes), len(plan.grants)
        block = np.empty((4, width), np.int32)
        block[0, :count] = plan.decodes
        self._computed[block[0, :count]] += 1
        block[1, :count] = self._computed[block[0, :count]]
        block[0, count:], block[1, count:] = self._padding, 1
        block[2, :granted], block[3, :granted] = self._page_changes((), plan.grants)
        block[2, granted:], block[3, granted:] = self._padding * self._pages, self._scratch_block
        return block

    def accept_mixed(self, plan: StepPlan, frame: MixedFrame) -> Numbers:
        """A plan's step for a graph that takes chunks: on the host and padded, its page changes sent ahead."""
        places, blocks = self._page_changes(plan.seats, plan.grants)
        if len(places):
            self.write_pages(*send(np.stack([places, blocks]), self._device))
        decodes = np.array(plan.decodes, np.int32)
        self._computed[decodes] += 1
        *tokens, last, rows, starts, offsets = self._chunk_sections(plan.chunks, frame.decodes)
        sampled = np.array([chunk.row for chunk in plan.chunks if chunk.samples], np.int32)
        lengths = self._computed[decodes], self._computed[sampled]
        sections = (decodes, lengths[0], *tokens, last, sampled, lengths[1], rows, starts, offsets)
        return frame.write(sections, self._padding)

    def known(self, row: Row, start: int, end: int) -> Numbers:
        """Tokens [start, end) that a row's seat brought."""
        return self._tokens[row][start:end]

    def write_pages(self, places: Tensor, blocks: Tensor) -> None:
        """Change the page tables."""
        self.tables.view(-1).scatter_(0, places.to(torch.int64), blocks)

    def device_step(
        self,
        rows: Tensor,
        lengths: Tensor,
        longest_decode: int,
        chunks: ChunkInputs | None = None,
        lora: LoraBatch | None = None,
    ) -> DeviceStep:
        """What the forward pass needs, for decodes at `rows` and the chunks after them."""
        token_ids = self.newest_token[rows]
        positions = lengths - 1
        token_rows = rows
        if chunks is not None:
            token_ids = torch.cat([token_ids, chunks.token_ids])
            positions = torch.cat([positions, chunks.positions])
            token_rows = torch.cat([rows, chunks.token_rows])
        positions = positions.to(torch.int64)
        pages = token_rows * self._pages + positions // self._block_size
        slots = self.tables.view(-1)[pages] * self._block_size + positions % self._block_size
        part = chunks.part if chunks is not None else None
        return DeviceStep(token_ids, positions, slots, self.tables, rows, lengths, longest_decode, part, lora)

    def _page_changes(self, seats: Sequence[Seat], grants: Sequence[Grant]) -> tuple[Numbers, Numbers]:
        """Where the page tables change, and to what. Seats before grants: a newcomer may be granted more at once."""
        if not seats and not grants:
            return NONE, NONE
        places: list[Numbers] = []
        blocks: list[Sequence[int]] = []
        for seat in seats:
            self._tokens[seat.row] = np.array(seat.tokens, np.int32)
            self._held[seat.row] = len(seat.blocks)
            places.append(np.arange(len(seat.blocks), dtype=np.int32) + seat.row * self._pages)
            blocks.append(seat.blocks)
        granted = []
        for grant in grants:
            granted.append(grant.row * self._pages + self._held[grant.row])
            self._held[grant.row] += 1
        places.append(np.array(granted, np.int32))
        blocks.append([grant.block for grant in grants])
        return np.concatenate(places), np.concatenate(blocks).astype(np.int32)

    def _chunk_sections(self, chunks: Sequence[Chunk], decodes: int) -> tuple[Numbers, ...]:
        """Sections in the order `_chunk_inputs` takes them, behind so many decodes."""
        rows = np.array([chunk.row for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        lengths = np.array([chunk.length for chunk in chunks], np.int32)
        ends = starts + lengths
        self._computed[rows] = ends
        offsets = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        samples = np.array([chunk.samples for chunk in chunks], np.bool_)
        last = decodes + offsets[1:][samples] - 1
        spans = zip(rows, starts, ends, strict=True)
        token_ids = np.concatenate([NONE, *(self._tokens[row][start:end] for row, start, end in spans)])
        assert len(token_ids) == offsets[-1], "a chunk computes tokens its seat did not bring"
        positions = np.arange(offsets[-1], dtype=np.int32) + np.repeat(starts - offsets[:-1], lengths)
        return token_ids, positions, np.repeat(rows, lengths), last, rows, starts, offsets


def _chunk_inputs(
    chunks: Sequence[Chunk],
    token_ids: Tensor,
    positions: Tensor,
    token_rows: Tensor,
    last: Tensor,
    rows: Tensor,
    starts: Tensor,
    offsets: Tensor,
) -> ChunkInputs:
    host_rows, host_starts, host_lengths = zip(*((c.row, c.start, c.length) for c in chunks), strict=True)
    part = PrefillPart(rows, starts, offsets, max(host_lengths), host_rows, host_starts, host_lengths)
    return ChunkInputs(token_ids, positions, token_rows, last, part)
