"""Admission asks, in a visible order, whether a waiting sequence may sit down, and says why when it may not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.core.ids import BlockId
from rota.policy.prefill_delayer import Verdict
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.blocks import BlockKey, BlockLedger, first_key, next_key
from rota.scheduler.books import Books
from rota.scheduler.group import Group
from rota.scheduler.reasons import Reason
from rota.scheduler.sequence import Sequence

# While requests wait for KV, this many are looked at in a pass to find one that needs less.
LOOK_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Offer:
    """What a sequence would sit down with: KV blocks that are already written, and how many more it needs."""

    cached: list[BlockId]
    fresh: int


class Admission:
    """Answers questions and books nothing."""

    def __init__(self, books: Books, is_caching: bool, policy: SlotPolicy) -> None:
        self._books = books
        self._is_caching = is_caching
        self._policy = policy

    def consider(
        self, sequence: Sequence, group: Group, delay: Verdict | None, is_invited: bool = False
    ) -> Offer | Reason:
        """May `sequence`, whose adapter is at hand, start now? For an invited one other tenants made room."""
        if not self._books.rows.available or not (is_invited or self._books.has_row(group)):
            return Reason.NO_ROW
        if sequence.account.is_full:
            return Reason.TENANT_FULL
        if sequence.flights:
            return Reason.IN_FLIGHT
        if not self._policy.admits(group, self._steps_needed(sequence, group)):
            return Reason.MAKING_ROOM
        if delay and not delay.is_allowed and not self._has_fresh_slot(group):
            return Reason.DELAYED
        return self._offer(sequence) or Reason.NO_KV

    def has_room(self, sequence: Sequence) -> bool:
        """Could `sequence` start if its adapter were at hand?"""
        account = sequence.account
        if sequence.flights or account.is_full or not self._books.has_row(self._books.group_of(sequence)):
            return False
        line_ends_at = self._books.line_ends_at.get(account.name)
        if line_ends_at is not None and sequence.arrival > line_ends_at:
            return False
        return self._offer(sequence) is not None

    def can_work(self, group: Group) -> bool:
        """Would an adapter run if it were in a slot? It holds KV already, or there is KV for its first request."""
        return bool(group.running or ((first := group.queue.first()) and self.has_room(first)))

    def lacks_kv(self, sequence: Sequence, promised: int = 0) -> bool:
        """Are there too few free blocks for `sequence`, wherever its adapter is? Some may be promised to others."""
        spare = self._books.blocks.free - self._books.running_count - promised
        if self._books.blocks.blocks_for(len(sequence.tokens)) <= spare:
            return False
        return self._offer(sequence, promised) is None

    def _steps_needed(self, sequence: Sequence, group: Group) -> int:
        """How many steps a sequence will need, if its answer is no longer than earlier ones."""
        prompt_steps = math.ceil(len(sequence.tokens) / self._books.step_tokens)
        return prompt_steps + group.most_tokens(sequence)

    def _has_fresh_slot(self, group: Group) -> bool:
        """Has the adapter not run yet in its slot? A slot that was given up for it must not stand idle."""
        residency = self._books.slots.residencies.get(group.adapter_id)
        return residency is not None and not residency.has_run

    def _offer(self, sequence: Sequence, promised: int = 0) -> Offer | None:
        blocks = self._books.blocks
        cached = blocks.find(self._findable_keys(sequence, blocks)) if self._is_caching else []
        needed = blocks.blocks_for(len(sequence.tokens))
        # One block is left for each running sequence, or the new sequence would soon be preempted when they grow.
        if blocks.free - promised - blocks.cost_of(cached, needed) < self._books.running_count:
            return None
        return Offer(cached, needed - len(cached))

    def _findable_keys(self, sequence: Sequence, blocks: BlockLedger) -> list[BlockKey]:
        """Names of the full blocks before the last token: the last token is always computed, to sample from it."""
        full = (len(sequence.tokens) - 1) // blocks.block_size
        if sequence.scored < sequence.prompt_length:
            # A token that is found in the cache is not computed, and so gives no score for the token after it.
            full = min(full, (sequence.scored - 1) // blocks.block_size)
        extend_keys(sequence, full, blocks.block_size)
        return sequence.block_keys[:full]


def extend_keys(sequence: Sequence, full: int, block_size: int) -> None:
    """Name the first `full` blocks of a sequence's tokens, once."""
    keys = sequence.block_keys
    while len(keys) < full:
        previous = keys[-1] if keys else first_key(sequence.request.adapter_id, sequence.request.cache_scope)
        start = len(keys) * block_size
        keys.append(next_key(previous, sequence.tokens[start : start + block_size]))
