"""Rows remember what plans said of them, so a step sends the device only what is new.

    on the device   page tables, and each row's newest token: sampled there, read there by the next decode
    on the host     each row's known tokens and how many of them the cache holds once all submitted steps are done

Everything a step brings travels as one array of int32 in one copy, section after section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rota.core.ids import Row
from rota.core.plan import Chunk, Grant, Seat, StepPlan
from rota.engine.device import send
from rota.engine.step.device_step import DeviceStep, Groups, LoraBatch, PrefillPart
from rota.engine.step.frames import Numbers, StepFrame, layout_of

NONE: Numbers = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class HostInputs:
    """A plan laid out in a frame, and facts about it that only the host knows."""

    frame: StepFrame
    numbers: Numbers  # the frame's, and behind them the adapters' if the step has any
    token_rows: Numbers  # [frame.tokens] each token's row, decodes first; padding's is the padding row
    sampled_rows: Numbers  # [frame.decodes + frame.sampled] the rows that sample, likewise
    chunks: Sequence[Chunk] = ()
    has_adapters: bool = False
    groups: Groups = ()  # of the adapters' tokens
    head_groups: Groups = ()  # of the rows that sample


class Rows:
    """What every row was told; one more row, the last, is padding's and sees only the scratch block."""

    def __init__(self, rows: int, pages: int, block_size: int, scratch_block: int, device: torch.device) -> None:
        self._device = device
        self._padding = rows
        # What a frame's sections are filled up with: rows, pages and chunks that read and write only the scratch block.
        self._fill = {
            "rows": rows, "lengths": 1, "places": rows * pages, "blocks": scratch_block, "token_ids": 0, "positions": 0,
            "token_rows": rows, "last": 0, "sampled_rows": rows, "sampled_lengths": 1, "chunk_rows": rows, "starts": 0,
        }  # fmt: skip
        self._pages = pages
        self._block_size = block_size
        self.tables = torch.full((rows + 1, pages), scratch_block, dtype=torch.int32, device=device)
        self.newest_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._tokens: list[Numbers] = [NONE] * rows
        self._held = [0] * rows  # blocks in its page table
        self._computed: Numbers = np.zeros(rows, np.int32)

    def accept(self, plan: StepPlan, frame: StepFrame) -> HostInputs:
        """Take down what the plan says, and lay its step out in the frame."""
        places, blocks = self._page_changes(plan.seats, plan.grants)
        self._resume([seat for seat in plan.seats if 0 < seat.computed == len(seat.tokens) - 1])
        if len(places) > frame.page_changes:
            self.write_pages(*send(np.stack([places, blocks]), self._device))
            places, blocks = NONE, NONE
        decodes = np.array(plan.decodes, np.int32)
        self._computed[decodes] += 1
        chunks = self._chunk_sections(plan.chunks, frame.decodes)
        sampled = np.array([chunk.row for chunk in plan.chunks if chunk.samples], np.int32)
        values = {
            "rows": decodes,
            "lengths": self._computed[decodes],
            "places": places,
            "blocks": blocks,
            **chunks,
            "sampled_rows": sampled,
            "sampled_lengths": self._computed[sampled],
        }
        # A chunk that is not there begins and ends where the last one ends.
        end = int(chunks["offsets"][-1]) if plan.chunks else 0
        line = layout_of(frame).pack(values, self._fill | {"offsets": end})
        token_rows = np.full(frame.tokens, self._padding, np.int32)
        token_rows[: len(decodes)] = decodes
        token_rows[frame.decodes : frame.decodes + len(chunks["token_rows"])] = chunks["token_rows"]
        sampled_rows = np.full(frame.decodes + frame.sampled, self._padding, np.int32)
        sampled_rows[: len(decodes)] = decodes
        sampled_rows[frame.decodes : frame.decodes + len(sampled)] = sampled
        return HostInputs(frame, line, token_rows, sampled_rows, plan.chunks)

    def known(self, row: Row, start: int, end: int) -> Numbers:
        """Tokens [start, end) that a row's seat brought."""
        return self._tokens[row][start:end]

    def write_pages(self, places: Tensor, blocks: Tensor) -> None:
        """Change the page tables."""
        self.tables.view(-1).scatter_(0, places.to(torch.int64), blocks)

    def device_step(
        self, sections: Mapping[str, Tensor], chunks: Sequence[Chunk] = (), lora: LoraBatch | None = None
    ) -> DeviceStep:
        """What the forward pass needs; page changes that came with the sections are written first.

        `chunks` are the step's own, for code that loops over them on the host; a graph does not know them.
        """
        if sections["places"].numel():
            self.write_pages(sections["places"], sections["blocks"])
        rows, lengths = sections["rows"], sections["lengths"]
        token_ids, positions, token_rows, part = self.newest_token[rows], lengths - 1, rows, None
        if sections["chunk_rows"].numel():
            token_ids = torch.cat([token_ids, sections["token_ids"]])
            positions = torch.cat([positions, sections["positions"]])
            token_rows = torch.cat([rows, sections["token_rows"]])
            part = _prefill_part(sections, chunks)
        positions = positions.to(torch.int64)
        pages = token_rows * self._pages + positions // self._block_size
        addresses = self.tables.view(-1)[pages] * self._block_size + positions % self._block_size
        return DeviceStep(token_ids, positions, addresses, self.tables, rows, lengths, part, lora)

    def _resume(self, seats: Sequence[Seat]) -> None:
        """Let rows decode whose sequences were computed in another row, up to their last token."""
        if not seats:
            return
        rows, tokens = [seat.row for seat in seats], [seat.tokens[-1] for seat in seats]
        self._computed[rows] = [seat.computed for seat in seats]
        places, newest = send(np.array([rows, tokens], np.int64), self._device)
        self.newest_token[places] = newest

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

    def _chunk_sections(self, chunks: Sequence[Chunk], decodes: int) -> dict[str, Numbers]:
        """The sections of chunks that lie behind so many decodes."""
        if not chunks:
            return NO_CHUNKS
        rows = np.array([chunk.row for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        lengths = np.array([chunk.length for chunk in chunks], np.int32)
        ends = starts + lengths
        self._computed[rows] = ends
        offsets = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        samples = np.array([chunk.samples for chunk in chunks], np.bool_)
        spans = zip(rows, starts, ends, strict=True)
        token_ids = np.concatenate([self._tokens[row][start:end] for row, start, end in spans])
        assert len(token_ids) == offsets[-1], "a chunk computes tokens its seat did not bring"
        return {
            "token_ids": token_ids,
            "positions": np.arange(offsets[-1], dtype=np.int32) + np.repeat(starts - offsets[:-1], lengths),
            "token_rows": np.repeat(rows, lengths),
            "last": decodes + offsets[1:][samples] - 1,
            "chunk_rows": rows,
            "starts": starts,
            "offsets": offsets,
        }


def _prefill_part(sections: Mapping[str, Tensor], chunks: Sequence[Chunk]) -> PrefillPart:
    lengths = tuple(chunk.length for chunk in chunks)
    return PrefillPart(
        rows=sections["chunk_rows"],
        starts=sections["starts"],
        offsets=sections["offsets"],
        longest=max(lengths, default=len(sections["token_ids"])),
        host_rows=tuple(chunk.row for chunk in chunks),
        host_starts=tuple(chunk.start for chunk in chunks),
        host_lengths=lengths,
    )


NO_CHUNKS = dict.fromkeys(("token_ids", "positions", "token_rows", "last", "chunk_rows", "starts", "offsets"), NONE)
