"""Delays ask the prefill delayer once a pass, and count how long each request is held back."""

from __future__ import annotations

from rota.core.events import PrefillsReleased
from rota.policy.prefill_delayer import PrefillDelayer, Verdict
from rota.scheduler.admission import Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.sequence import Arrival, Sequence

# The first of an adapter's queue: the rank of its tenant, and its arrival. No two share an arrival, so sequences are
# never compared.
Head = tuple[float, Arrival, Sequence, Group]


class Delays:
    """Without a delayer every prompt may start."""

    def __init__(self, books: Books, admission: Admission, delayer: PrefillDelayer | None) -> None:
        self._books = books
        self._admission = admission
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
        admissible = self._admissible(heads)
        verdict = self._delayer.decide(
            running=books.rows.in_use,
            admissible=admissible,
            token_usage=1.0 - books.blocks.free / books.blocks.total,
            now=draft.now,
            blocked_by_adapters=not heads and bool(books.absent),
            oldest_delay_s=max((first.held_s for first in firsts), default=0.0),
        )
        # A sequence without a row could not start anyway.
        self._held_back, self._held_back_at = [] if verdict.is_allowed else firsts[: books.rows.available], draft.now
        if verdict.is_allowed and admissible:  # without prompts here the verdict is on other replicas' prompts
            released = PrefillsReleased(
                at=draft.now,
                reason=verdict.reason,
                passes=verdict.passes,
                waited_s=verdict.waited_s,
                engine_id=books.engine_id,
            )
            books.outbox.append(released)
        if not verdict.is_allowed and heads:
            # Without work in flight nothing else would make the loop ask again.
            draft.ask_again(verdict.ask_again_at)
        return verdict

    def _admissible(self, heads: list[Head]) -> int:
        """How many requests could start now, about: one head at a time, and those behind it as if they were as short
        as the shortest of its tenant there."""
        books, left = self._books, self._books.rows.available
        promised = 0  # blocks
        count = 0
        for _, _, first, group in heads:
            if count >= left:
                break
            likely = self._first_that_fits(first, group, promised)
            if likely is None:
                continue
            needed = books.blocks.blocks_for(likely.length)
            spare = max(needed, books.blocks.free - books.running_count - promised)
            more = min(group.waiting, spare // needed)
            count += more
            promised += more * needed
        return min(count, left)

    def _first_that_fits(self, first: Sequence, group: Group, promised: int) -> Sequence | None:
        """The head of a queue, or the shortest sequence of its tenant there, if KV blocks and its key allow a start."""
        for sequence in (first, group.queue.shortest_of(first.account)):
            if sequence is None or sequence.flights or sequence.account.is_full:
                continue
            if not self._admission.lacks_kv(sequence, promised):
                return sequence
        return None

    def note_admitted(self, prompts: int) -> None:
        """This many prompts started in this pass."""
        if self._delayer and prompts:
            self._delayer.note_batch(prompts)
