"""Admission asks, in a visible order, whether a waiting sequence may sit down, and says why when it may not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.core.ids import BlockId
from rota.policy.prefill_delayer import Verdict
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.books import Books
from rota.scheduler.group import Group
from rota.scheduler.prefix_lookup import PrefixLookup, findable
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
        self.lookup = PrefixLookup(books.blocks)

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
        if not self.lets_in(sequence, group):
            return Reason.MAKING_ROOM
        if delay and not delay.is_allowed and not self._has_fresh_slot(group):
            return Reason.DELAYED
        return self._offer(sequence)

    def lets_in(self, sequence: Sequence, group: Group) -> bool:
        """May an adapter that is at hand still take `sequence`? One that makes room takes only what will be brief."""
        return self._policy.admits(group, self._steps_needed(sequence, group))

    def has_room(self, sequence: Sequence) -> bool:
        """Could `sequence` start if its adapter were at hand?"""
        account = sequence.account
        if sequence.flights or account.is_full or not self._books.has_row(self._books.group_of(sequence)):
            return False
        line_ends_at = self._books.line_ends_at.get(account.name)
        if line_ends_at is not None and sequence.arrival > line_ends_at:
            return False
        return bool(self._has_kv(sequence))

    def can_work(self, group: Group) -> bool:
        """Would an adapter run if it were in a slot? It holds KV already, or there is KV for its first request."""
        return bool(group.running or ((first := group.queue.first()) and self.has_room(first)))

    def lacks_kv(self, sequence: Sequence, promised: int = 0) -> bool:
        """Are there too few free blocks for `sequence`, wherever its adapter is? Some may be promised to others."""
        return self._has_kv(sequence, promised) is False

    def _steps_needed(self, sequence: Sequence, group: Group) -> int:
        """How many steps a sequence will need, if its answer is no longer than earlier ones."""
        prompt_steps = math.ceil(len(sequence.tokens) / self._books.step_tokens)
        return prompt_steps + group.most_tokens(sequence)

    def _has_fresh_slot(self, group: Group) -> bool:
        """Has the adapter not run yet in its slot? A slot that was given up for it must not stand idle."""
        residency = self._books.slots.residencies.get(group.adapter_id)
        return residency is not None and not residency.has_run

    def _offer(self, sequence: Sequence) -> Offer | Reason:
        has_kv, needed = self._has_kv(sequence), self._needed(sequence)
        if has_kv is False:
            return Reason.NO_KV
        if not self._is_caching:
            return Offer([], needed)
        if has_kv is None or not self.lookup.is_complete(sequence):
            return Reason.LOOKED_UP
        cached = self.lookup.blocks_of(sequence)
        self.lookup.charge(needed)
        return Offer(cached, needed - len(cached))

    def _has_kv(self, sequence: Sequence, promised: int = 0) -> bool | None:
        """Are there blocks for a sequence? None: a later pass knows, when more of its prompt is looked up."""
        blocks, needed = self._books.blocks, self._needed(sequence)
        # One block is left for each running sequence, or the new sequence would soon be preempted when they grow.
        spare = blocks.free - promised - self._books.running_count
        if needed <= spare:
            return True
        if not self._is_caching or needed - findable(sequence, blocks.block_size) > spare:
            return False
        is_complete = self.lookup.is_complete(sequence)
        if needed - self.lookup.held(sequence) > spare:
            return False if is_complete else None
        return blocks.cost_of(self.lookup.blocks_of(sequence), needed) <= spare

    def _needed(self, sequence: Sequence) -> int:
        return self._books.blocks.blocks_for(len(sequence.tokens))
