"""The batch fills a step with tokens: decodes first, then prompts that have begun, then newcomers."""

from __future__ import annotations

import heapq
import math
from itertools import islice

from rota.core.events import Admitted, PrefillsReleased
from rota.core.ids import RequestId
from rota.core.plan import Chunk, Grant, Scoring, Seat
from rota.policy.prefill_delayer import Outcome, PrefillDelayer, Verdict
from rota.scheduler.admission import LOOK_AHEAD, Admission, Offer, Reason
from rota.scheduler.books import NOWHERE, Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.sequence import Phase, Refusal, Sequence

# So often may a request that waits for KV be overtaken.
MOST_OVERTAKES = 64

# The first in an adapter's queue; no two share an arrival, so sequences are never compared.
Head = tuple[tuple[float, RequestId], Sequence, Group]


class Batch:
    """Books what it plans: rows, blocks, tokens in flight."""

    def __init__(self, books: Books, admission: Admission, delayer: PrefillDelayer | None) -> None:
        self._books = books
        self._admission = admission
        self._delayer = delayer
        self._held_back: list[Sequence] = []  # by the delayer, since the last pass
        self._held_back_at = 0.0

    # ── those who run ────────────────────────────────────────────────────────────────────────────────────────────

    def plan_decodes(self, draft: Draft) -> None:
        flight, rows, step_id = draft.flight.decodes, draft.decodes, draft.step_id
        decode = Phase.DECODE  # looked up once: Python 3.11 takes its time over a member of an enumeration
        for group in self._books.open_groups:
            before = len(rows)
            context_tokens = 0
            # A copy, since growing may preempt somebody out of the list.
            for sequence in group.decoding.copy():
                planned = sequence.planned
                if planned >= sequence.limit - 1 or sequence.phase is not decode:
                    continue  # its last token is in flight, or it was preempted a moment ago
                if planned == sequence.room and not self._grow(draft, sequence):
                    continue
                planned += 1
                sequence.planned = planned
                sequence.flights += 1
                sequence.step_id = step_id
                context_tokens += planned
                flight.append(sequence)
                rows.append(sequence.row)  # type: ignore[arg-type]  # whoever decodes sits at a row
            if len(rows) > before:
                draft.context_tokens += context_tokens
                self._note_run(draft, group, len(rows) - before)
        draft.budget -= len(rows)

    def _grow(self, draft: Draft, sequence: Sequence) -> bool:
        """Grant one more block, at somebody's cost if there is none; False if that somebody is `sequence` itself."""
        while not self._books.blocks.free:
            victim = self._victim(draft)
            self._books.preempt(victim, draft.now)
            if victim is sequence:
                return False
        block = self._books.blocks.allocate_one()
        sequence.blocks.append(block)
        sequence.room += self._books.blocks.block_size
        assert sequence.row is not None
        draft.grants.append(Grant(sequence.row, block))
        return True

    def _victim(self, draft: Draft) -> Sequence:
        """Who gives up KV: of the parked, else of all who are not in this step yet, the last to arrive."""
        is_open = {group.adapter_id for group in self._books.open_groups}
        return max(
            (sequence for sequence in self._books.running() if sequence.step_id != draft.step_id),
            key=lambda sequence: (sequence.request.adapter not in is_open, sequence.arrival),
        )

    def plan_chunks(self, draft: Draft) -> None:
        """Go on with prompts that have begun, whatever the delayer says."""
        for group in self._books.open_groups:
            for sequence in group.prefilling:
                self._plan_chunk(draft, sequence, group)

    def _plan_chunk(self, draft: Draft, sequence: Sequence, group: Group) -> None:
        start = sequence.planned
        length = min(draft.budget, len(sequence.tokens) - start)
        if length <= 0:
            return
        samples = start + length == len(sequence.tokens)
        assert sequence.row is not None
        draft.chunks.append(Chunk(sequence.row, start, length, samples))
        draft.flight.chunks.append((sequence, start + length))
        draft.flight.prompt_tokens += length
        draft.budget -= length
        draft.context_tokens += start + length
        sequence.planned += length
        sequence.flights += 1
        sequence.step_id = draft.step_id
        if samples:
            draft.flight.samplers.append(sequence)
        if sequence.scored < sequence.prompt_length:
            _plan_scores(draft, sequence)
        self._note_run(draft, group, length)

    def _note_run(self, draft: Draft, group: Group, tokens: int) -> None:
        group.attained += tokens
        if group.ran_in == draft.step_id:
            return
        group.ran_in, group.ran_at = draft.step_id, draft.now
        group.steps += 1
        if group is not self._books.base:
            draft.adapters += 1
            self._books.slots.use(group.adapter_id)

    # ── those who wait ───────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, draft: Draft) -> None:
        """Seat newcomers whose adapter is at hand, by arrival; one that cannot start never stops another's adapter."""
        heads: list[Head] = []
        for group in self._books.open_groups:
            if first := group.queue.first():
                heads.append((first.arrival, first, group))
        delay = self._ask_delayer(draft, heads)
        self._books.line_ends_at = NOWHERE
        if not heads:
            return
        heapq.heapify(heads)
        passed_over: list[Sequence] = []  # no KV for them; smaller ones behind may pass, within bounds
        turned_away: list[Sequence] = []  # too long for a drain; shorter ones behind may pass likewise
        elders: list[Sequence] | None = None  # no slot either; looked for when somebody is about to take KV
        admitted, held_s, why_others_wait = 0, 0.0, Reason.STEP_FULL
        while heads and draft.budget > 0:
            _, sequence, group = heapq.heappop(heads)
            verdict = self._admission.consider(sequence, group, delay)
            if isinstance(verdict, Offer):
                elders = self._elders() if elders is None else elders
                if line_ends_at := _end_of_line(elders, sequence):
                    self._refuse(draft, sequence, Reason.IN_LINE, delay)
                    why_others_wait, self._books.line_ends_at = Reason.IN_LINE, line_ends_at
                    break
                self._sit_down(draft, sequence, group, verdict)
                self._plan_chunk(draft, sequence, group)
                admitted, held_s = admitted + 1, max(held_s, sequence.held_s)
                for one in (*passed_over, *elders):
                    one.overtaken += one.arrival < sequence.arrival
            else:
                self._refuse(draft, sequence, verdict, delay)
                if verdict is Reason.NO_ROW:
                    why_others_wait = Reason.NO_ROW
                    break
                if verdict is Reason.NO_KV:
                    if len(passed_over) == LOOK_AHEAD or sequence.overtaken >= MOST_OVERTAKES:
                        why_others_wait, self._books.line_ends_at = Reason.IN_LINE, sequence.arrival
                        break
                    passed_over.append(sequence)
                elif verdict is Reason.DRAINING and len(turned_away) < LOOK_AHEAD:
                    turned_away.append(sequence)
                else:
                    continue  # the rest of this group waits for the same thing
                group.queue.remove(sequence)
            if first := group.queue.first():
                heapq.heappush(heads, (first.arrival, first, group))
        for _, first, _ in heads:
            self._refuse(draft, first, why_others_wait, delay)
            if why_others_wait is Reason.STEP_FULL:
                # It could have started beside those who were held back and fill the step now: it was held back as well.
                first.held_s = max(first.held_s, min(held_s, draft.now - first.request.arrived_at))
        for sequence in (*passed_over, *turned_away):
            self._books.group_of(sequence).queue.push(sequence)
        if self._delayer and admitted:
            self._delayer.note_batch(admitted)

    def _elders(self) -> list[Sequence]:
        """Those who are first due a slot and lack KV too: nobody gives them one, so it is here that they age."""
        firsts = [group.queue.first() for group in islice(self._books.absent, LOOK_AHEAD)]
        return [first for first in firsts if first and self._admission.lacks_kv(first)]

    def _ask_delayer(self, draft: Draft, heads: list[Head]) -> Verdict | None:
        if not self._delayer:
            return None
        books = self._books
        admissible = sum(group.waiting for *_, group in heads) if books.rows.free else 0
        firsts = [first for _, first, _ in sorted(heads)]
        for sequence in self._held_back:
            sequence.held_s += draft.now - self._held_back_at
        verdict = self._delayer.decide(
            running=books.running_count,
            admissible=admissible,
            token_usage=1.0 - books.blocks.free / books.blocks.total,
            now=draft.now,
            blocked_by_adapters=not heads and bool(books.absent),
            oldest_delay_s=max((first.held_s for first in firsts), default=0.0),
        )
        # Those who have no row would not start either way.
        self._held_back, self._held_back_at = [] if verdict.is_allowed else firsts[: books.rows.free], draft.now
        if verdict.is_allowed and verdict.reason is not Outcome.NOTHING:
            books.outbox.append(PrefillsReleased(draft.now, verdict.reason, verdict.passes, verdict.waited_s))
        if not verdict.is_allowed:
            # Without work in flight nothing else would make the loop ask again.
            draft.ask_again(verdict.ask_again_at)
        return verdict

    def _refuse(self, draft: Draft, sequence: Sequence, reason: Reason, delay: Verdict | None) -> None:
        last = sequence.refusal
        ask_again_at = delay.ask_again_at if delay and reason is Reason.DELAYED else math.inf
        if last and last.reason == reason and last.ask_again_at == ask_again_at:
            return  # as in the last pass, and mostly for hundreds of passes
        since = last.since if last and last.reason == reason else draft.now
        sequence.refusal = Refusal(reason, since, ask_again_at)

    def _sit_down(self, draft: Draft, sequence: Sequence, group: Group, offer: Offer) -> None:
        blocks = self._books.blocks
        self._books.dequeue(sequence)
        blocks.hold(offer.cached)
        sequence.blocks = offer.cached + blocks.allocate(offer.fresh)
        sequence.room = len(sequence.blocks) * blocks.block_size
        sequence.row = self._books.rows.take()
        cached_tokens = len(offer.cached) * blocks.block_size
        sequence.computed = sequence.planned = cached_tokens
        sequence.next_full = cached_tokens + blocks.block_size
        reasons = _reasons(sequence, group)
        sequence.refusal = None
        sequence.overtaken = 0
        if not sequence.output_length:
            sequence.cached_tokens = cached_tokens
        group.join(sequence, Phase.PREFILL)
        self._books.outbox.append(Admitted(sequence.request_id, draft.now, cached_tokens, reasons))
        draft.seats.append(
            Seat(
                sequence.request_id,
                sequence.row,
                sequence.request.adapter,
                tuple(sequence.tokens),
                sequence.prompt_length,
                tuple(sequence.blocks),
                sequence.request.sampling,
            )
        )

    def settle(self) -> None:
        """Those whose last chunk is planned decode from the next step on."""
        for group in self._books.open_groups:
            if not group.prefilling:
                continue
            for sequence in [one for one in group.prefilling if one.planned >= len(one.tokens)]:
                group.part(sequence)
                group.join(sequence, Phase.DECODE)


def _end_of_line(elders: list[Sequence], comer: Sequence) -> tuple[float, RequestId] | None:
    """The arrival of one whom `comer` may not overtake as well."""
    tired = (one.arrival for one in elders if one.overtaken >= MOST_OVERTAKES and one.arrival < comer.arrival)
    return min(tired, default=None)


def _plan_scores(draft: Draft, sequence: Sequence) -> None:
    """Score what a chunk makes known of its prompt, unless that was done before a preemption."""
    sampling, start = sequence.request.sampling, sequence.scored
    end = min(sequence.planned + 1, sequence.prompt_length)
    if end <= start:
        return
    assert sequence.row is not None and sampling.prompt_logprobs is not None
    draft.scorings.append(Scoring(sequence.row, start, end, sampling.prompt_logprobs))
    draft.flight.scored.append((sequence, end - start))
    sequence.scored = end


def _reasons(sequence: Sequence, group: Group) -> tuple[str, ...]:
    """What a sequence that may start now has waited for."""
    has_waited_for_slot = group.slot_since > sequence.request.arrived_at
    refusal = sequence.refusal
    return ((Reason.NOT_IN_SLOT.value,) if has_waited_for_slot else ()) + ((refusal.reason,) if refusal else ())
