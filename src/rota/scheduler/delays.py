"""Delays ask the prefill delayer once a pass, and count how long each request is held back."""

from __future__ import annotations

from rota.core.events import PrefillsReleased
from rota.policy.prefill_delayer import Outcome, PrefillDelayer, Verdict
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.sequence import Arrival, Sequence

# The first of an adapter's queue: the rank of its tenant, and its arrival. No two share an arrival, so sequences are
# never compared.
Head = tuple[float, Arrival, Sequence, Group]


class Delays:
    """Without a delayer every prompt may start."""

    def __init__(self, books: Books, delayer: PrefillDelayer | None) -> None:
        self._books = books
        self._delayer = delayer
        self._held_back: list[Sequence] = []  # since the last pass
        self._held_back_at = 0.0

    def ask(self, draft: Draft, heads: list[Head]) -> Verdict | None:
        """May prompts start? `heads` are the sequences that could."""
        if not self._delayer:
            return None
        books = self._books
        firsts = [first for _, _, first, _ in sorted(heads)]
        for sequence in self._held_back:
            sequence.held_s += draft.now - self._held_back_at
        verdict = self._delayer.decide(
            running=books.running_count,
            admissible=sum(group.waiting for *_, group in heads) if books.rows.free else 0,
            token_usage=1.0 - books.blocks.free / books.blocks.total,
            now=draft.now,
            blocked_by_adapters=not heads and bool(books.absent),
            oldest_delay_s=max((first.held_s for first in firsts), default=0.0),
        )
        # A sequence without a row could not start anyway.
        self._held_back, self._held_back_at = [] if verdict.is_allowed else firsts[: books.rows.free], draft.now
        if verdict.is_allowed and verdict.reason is not Outcome.NOTHING:
            released = PrefillsReleased(
                at=draft.now,
                reason=verdict.reason,
                passes=verdict.passes,
                waited_s=verdict.waited_s,
                engine_id=books.engine_id,
            )
            books.outbox.append(released)
        if not verdict.is_allowed:
            # Without work in flight nothing else would make the loop ask again.
            draft.ask_again(verdict.ask_again_at)
        return verdict

    def note_admitted(self, prompts: int) -> None:
        """This many prompts started in this pass."""
        if self._delayer and prompts:
            self._delayer.note_batch(prompts)
