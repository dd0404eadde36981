"""Admission asks, in order, whether the next waiting sequence may sit down, and says why when it may not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rota.core.ids import BlockId
from rota.scheduler.blocks import BlockKey, BlockLedger, first_key, next_key
from rota.scheduler.rows import RowLedger
from rota.scheduler.sequence import Sequence


class Refusal(StrEnum):
    """Why a sequence waits. Each of these ends when a step is committed, so none needs a time to ask again."""

    IN_FLIGHT = "its last step before preemption is still in flight"
    NO_ROW = "as many requests run as may run"
    NO_KV = "its prompt does not fit into the KV blocks that are free"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a sequence would sit down with: KV blocks that are already written, and how many more it needs."""

    cached: list[BlockId]
    fresh: int


class Admission:
    """Questions only: nothing is booked here."""

    def __init__(self, rows: RowLedger, blocks: BlockLedger, is_caching: bool) -> None:
        self._rows = rows
        self._blocks = blocks
        self._is_caching = is_caching

    def consider(self, sequence: Sequence, running: int) -> Offer | Refusal:
        """May `sequence` join `running` others?"""
        if sequence.flights:
            return Refusal.IN_FLIGHT
        if not self._rows.free:
            return Refusal.NO_ROW
        cached = self._blocks.find(self._findable_keys(sequence)) if self._is_caching else []
        needed = self._blocks.blocks_for(len(sequence.tokens))
        # One block is left for each running sequence, or the newcomer would soon be preempted for their growth.
        if self._blocks.free - self._blocks.cost_of(cached, needed) < running:
            return Refusal.NO_KV
        return Offer(cached, needed - len(cached))

    def _findable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Names of the full blocks before the last token: that one is always computed, to sample from it."""
        full = (len(sequence.tokens) - 1) // self._blocks.block_size
        extend_keys(sequence, full, self._blocks.block_size)
        return sequence.block_keys[:full]


def extend_keys(sequence: Sequence, full: int, block_size: int) -> None:
    """Name the first `full` blocks of a sequence's tokens, once."""
    keys = sequence.block_keys
    while len(keys) < full:
        previous = keys[-1] if keys else first_key(sequence.request.adapter)
        start = len(keys) * block_size
        keys.append(next_key(previous, sequence.tokens[start : start + block_size]))
