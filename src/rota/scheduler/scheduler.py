"""The scheduler turns what happened into what to do next, and what was done into events.

It decides and never does: a plan is a value, and a world carries it out. `plan` books what it promises (rows,
blocks, tokens in flight), so at depth 2 the next plan can be made before this one's tokens are known.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from rota.core.config import Capacity, SchedulerConfig
from rota.core.errors import ConfigError, Fault, FaultCode
from rota.core.events import Admitted, Event, Finished, FinishReason, Preempted, Produced
from rota.core.ids import RequestId, Row
from rota.core.messages import Abort, AbortAll, Message, Submit
from rota.core.plan import Chunk, Grant, Seat, StepPlan, StepResult, TokenLogprobs
from rota.core.request import Request
from rota.scheduler.admission import Admission, Offer, Refusal, extend_keys
from rota.scheduler.blocks import BlockLedger
from rota.scheduler.queue import WaitingQueue
from rota.scheduler.rows import RowLedger
from rota.scheduler.sequence import Phase, Sequence


@dataclass(slots=True)
class Flight:
    """Who takes part in a step: the sequences behind a plan's rows."""

    decodes: list[Sequence] = field(default_factory=list)
    # With the number of computed tokens each chunk reaches.
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    samplers: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int
    flight: Flight = field(default_factory=Flight)
    seats: list[Seat] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Row] = field(default_factory=list)
    context_tokens: int = 0


class Scheduler:
    """The only writer of queues, ledgers and sequences."""

    def __init__(self, config: SchedulerConfig, capacity: Capacity) -> None:
        if config.chunked_prefill_size < capacity.rows:
            raise ConfigError(
                f"chunked_prefill_size is {config.chunked_prefill_size}, but {capacity.rows} running requests each "
                f"need a token a step; raise it to at least that, or lower max_running_requests."
            )
        self._max_queued = config.max_queued_requests
        self._step_tokens = config.chunked_prefill_size
        self._is_caching = config.enable_prefix_caching
        self._max_sequence_tokens = capacity.max_sequence_tokens
        self._rows = RowLedger(capacity.rows)
        self._blocks = BlockLedger(capacity.blocks, capacity.block_size)
        self._admission = Admission(self._rows, self._blocks, self._is_caching)
        self._queue = WaitingQueue()
        self._sequences: dict[RequestId, Sequence] = {}  # every open one
        self._prefilling: list[Sequence] = []  # both by arrival, so the newest is last
        self._decoding: list[Sequence] = []
        self._flights: dict[int, Flight] = {}
        self._steps = 0
        self._outbox: list[Event] = []
        self._last_refusal: Refusal | None = None

    @property
    def is_idle(self) -> bool:
        """Nobody waits, nobody runs, nothing is in flight."""
        return not self._sequences and not self._flights

    def refusals(self) -> dict[RequestId, str]:
        """Every waiting request with the reason it was last refused."""
        reason = self._last_refusal.value if self._last_refusal else "it was never considered"
        return {sequence.request_id: reason for sequence in self._queue}

    # ── what happened ────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, message: Message) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case Abort(request_id, at):
                if sequence := self._sequences.get(request_id):
                    self._finish(sequence, FinishReason.ABORT, at)
            case AbortAll(at):
                for sequence in list(self._sequences.values()):
                    self._finish(sequence, FinishReason.ABORT, at)

    def _submit(self, request: Request) -> None:
        if fault := self._fault_of(request):
            self._outbox.append(
                Finished(
                    request.request_id,
                    request.arrived_at,
                    FinishReason.FAILED,
                    prompt_tokens=len(request.prompt),
                    fault=fault,
                )
            )
            return
        longest = min(self._max_sequence_tokens, self._blocks.total * self._blocks.block_size)
        sequence = Sequence(request, min(len(request.prompt) + request.sampling.max_new_tokens, longest))
        self._sequences[request.request_id] = sequence
        self._queue.push(sequence)

    def _fault_of(self, request: Request) -> Fault | None:
        length = len(request.prompt)
        kv_tokens = self._blocks.total * self._blocks.block_size
        if request.request_id in self._sequences:
            return Fault(
                FaultCode.DUPLICATE_ID, f"A request with the id {request.request_id} is already open."
            )
        if length >= self._max_sequence_tokens:
            return Fault(
                FaultCode.PROMPT_TOO_LONG,
                f"The prompt has {length} tokens; with at least one token of output it must stay within the "
                f"context of {self._max_sequence_tokens}.",
                "prompt",
            )
        if length >= kv_tokens:
            return Fault(
                FaultCode.KV_TOO_SMALL,
                f"The prompt has {length} tokens, but the KV cache holds {kv_tokens} in all; shorten the prompt, "
                f"or give the server more memory (mem_fraction_static, kv_blocks).",
                "prompt",
            )
        if len(self._queue) >= self._max_queued:
            return Fault(FaultCode.QUEUE_FULL, f"{self._max_queued} requests already wait; try again later.")
        return None

    # ── what to do ───────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, now: float) -> StepPlan:
        """Decodes first, then prompts that have begun, then newcomers, within the step's tokens."""
        draft = Draft(budget=self._step_tokens)
        self._plan_decodes(draft, now)
        for sequence in self._prefilling:
            self._plan_chunk(draft, sequence)
        self._admit(draft, now)
        self._settle_prefills()
        return self._depart(draft)

    def _plan_decodes(self, draft: Draft, now: float) -> None:
        flight, rows = draft.flight.decodes, draft.decodes
        context_tokens = 0
        # A copy, since preemption takes from the list; victims are newer, so they come later in it.
        for sequence in self._decoding.copy():
            planned = sequence.planned
            if planned >= sequence.limit - 1 or sequence.phase is not Phase.DECODE:
                continue  # its last token is in flight, or it was preempted a moment ago
            if planned == sequence.room and not self._grow(draft, sequence, now):
                continue
            planned += 1
            sequence.planned = planned
            sequence.flights += 1
            context_tokens += planned
            flight.append(sequence)
            rows.append(sequence.row)  # type: ignore[arg-type]  # whoever decodes sits at a row
        draft.budget -= len(rows)
        draft.context_tokens = context_tokens

    def _grow(self, draft: Draft, sequence: Sequence, now: float) -> bool:
        """Grant one more block, at the cost of the newest if there is none; False if that is `sequence` itself."""
        while not self._blocks.free:
            victim = self._newest()
            self._preempt(victim, now)
            if victim is sequence:
                return False
        block = self._blocks.allocate_one()
        sequence.blocks.append(block)
        sequence.room += self._blocks.block_size
        assert sequence.row is not None
        draft.grants.append(Grant(sequence.row, block))
        return True

    def _newest(self) -> Sequence:
        """Of those who run, the last to arrive. It has no share in the draft yet: that is filled by arrival."""
        newest = [group[-1] for group in (self._prefilling, self._decoding) if group]
        return max(newest, key=lambda sequence: sequence.arrival)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self._leave(sequence)
        self._queue.push(sequence)
        self._outbox.append(Preempted(sequence.request_id, now))

    def _plan_chunk(self, draft: Draft, sequence: Sequence) -> None:
        start = sequence.planned
        length = min(draft.budget, len(sequence.tokens) - start)
        if length <= 0:
            return
        samples = start + length == len(sequence.tokens)
        assert sequence.row is not None
        draft.chunks.append(Chunk(sequence.row, start, length, samples))
        draft.flight.chunks.append((sequence, start + length))
        draft.budget -= length
        draft.context_tokens += start + length
        sequence.planned += length
        sequence.flights += 1
        if samples:
            draft.flight.samplers.append(sequence)

    def _admit(self, draft: Draft, now: float) -> None:
        while draft.budget > 0 and (sequence := self._queue.first()):
            verdict = self._admission.consider(sequence, len(self._prefilling) + len(self._decoding))
            if isinstance(verdict, Refusal):
                self._last_refusal = verdict
                return
            self._sit_down(draft, sequence, verdict, now)
            self._plan_chunk(draft, sequence)

    def _sit_down(self, draft: Draft, sequence: Sequence, offer: Offer, now: float) -> None:
        self._queue.remove(sequence)
        self._blocks.hold(offer.cached)
        sequence.blocks = offer.cached + self._blocks.allocate(offer.fresh)
        sequence.room = len(sequence.blocks) * self._blocks.block_size
        sequence.row = self._rows.take()
        sequence.phase = Phase.PREFILL
        cached_tokens = len(offer.cached) * self._blocks.block_size
        sequence.computed = sequence.planned = cached_tokens
        sequence.next_full = cached_tokens + self._blocks.block_size
        if not sequence.output_length:
            sequence.cached_tokens = cached_tokens
        insort(self._prefilling, sequence, key=_arrival)
        self._outbox.append(Admitted(sequence.request_id, now, cached_tokens))
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

    def _settle_prefills(self) -> None:
        """Those whose last chunk is planned decode from the next step on."""
        still: list[Sequence] = []
        for sequence in self._prefilling:
            if sequence.planned < len(sequence.tokens):
                still.append(sequence)
            else:
                sequence.phase = Phase.DECODE
                insort(self._decoding, sequence, key=_arrival)
        self._prefilling = still

    def _depart(self, draft: Draft) -> StepPlan:
        self._steps += 1
        self._flights[self._steps] = draft.flight
        return StepPlan(
            self._steps,
            tuple(draft.seats),
            tuple(draft.grants),
            tuple(draft.chunks),
            tuple(draft.decodes),
            draft.context_tokens,
        )

    # ── what was done ────────────────────────────────────────────────────────────────────────────────────────────

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Write a step's tokens down; gives the events since the last commit."""
        flight = self._flights.pop(plan.step_id)
        for sequence, reached in flight.chunks:
            sequence.flights -= 1
            if sequence.row is not None:
                sequence.computed = reached
        for sequence in flight.decodes:
            sequence.flights -= 1
            sequence.computed += 1
        self._write_tokens(flight.decodes + flight.samplers, result)
        for sequence, _ in flight.chunks:
            if sequence.row is not None:
                self._publish(sequence)
        events, self._outbox = self._outbox, []
        return events

    def _write_tokens(self, sequences: list[Sequence], result: StepResult) -> None:
        assert len(sequences) == len(result.tokens), "a world gives one token per sampled row"
        request_ids: list[RequestId] = []
        tokens: list[int] = []
        ended: list[tuple[Sequence, FinishReason]] = []
        dropped = 0
        for sequence, token in zip(sequences, result.tokens, strict=True):
            if sequence.phase is Phase.FINISHED:
                dropped += 1
                continue
            sequence.tokens.append(token)
            request_ids.append(sequence.request_id)
            tokens.append(token)
            if token in sequence.stop_token_ids:
                ended.append((sequence, FinishReason.STOP))
            elif len(sequence.tokens) >= sequence.limit:
                ended.append((sequence, FinishReason.LENGTH))
            elif sequence.computed == sequence.next_full:
                self._publish(sequence)
        if tokens:
            logprobs = _renumber(sequences, result) if dropped and result.logprobs else result.logprobs
            self._outbox.append(Produced(result.at, tuple(request_ids), tuple(tokens), logprobs))
        for sequence, reason in ended:
            self._publish(sequence)
            self._finish(sequence, reason, result.at)

    def _publish(self, sequence: Sequence) -> None:
        """Let others find the blocks of a sequence that have become full."""
        if not self._is_caching:
            return
        size = self._blocks.block_size
        while sequence.row is not None and sequence.next_full <= sequence.computed:
            index = sequence.next_full // size - 1
            extend_keys(sequence, index + 1, size)
            self._blocks.publish(sequence.blocks[index], sequence.block_keys[index])
            sequence.next_full += size

    # ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, sequence: Sequence, reason: FinishReason, at: float) -> None:
        if sequence.phase is Phase.WAITING:
            self._queue.remove(sequence)
        else:
            self._leave(sequence)
        sequence.phase = Phase.FINISHED
        del self._sequences[sequence.request_id]
        self._outbox.append(
            Finished(
                sequence.request_id,
                at,
                reason,
                sequence.prompt_length,
                sequence.output_length,
                sequence.cached_tokens,
            )
        )

    def _leave(self, sequence: Sequence) -> None:
        """Give back row and blocks. A step in flight may still use them: the device works in order."""
        assert sequence.row is not None
        (self._prefilling if sequence.phase is Phase.PREFILL else self._decoding).remove(sequence)
        self._rows.give_back(sequence.row)
        self._blocks.release(sequence.blocks)
        sequence.stand_up()

    def check(self) -> None:
        """Assert that the books balance: every row, block and sequence is accounted for."""
        running = self._prefilling + self._decoding
        self._blocks.check(sequence.blocks for sequence in running)
        assert len(running) + self._rows.free == self._rows.total, "a row is lost or shared"
        assert len({sequence.row for sequence in running}) == len(running), "two sequences share a row"
        assert {*map(id, self._sequences.values())} == {*map(id, running), *map(id, self._queue)}
        for group in (self._prefilling, self._decoding):
            assert group == sorted(group, key=_arrival)


def _arrival(sequence: Sequence) -> tuple[float, RequestId]:
    return sequence.arrival


def _renumber(sequences: list[Sequence], result: StepResult) -> tuple[tuple[int, TokenLogprobs], ...]:
    """The result's logprobs by position among the tokens that were kept."""
    by_position = dict(result.logprobs)
    kept = [i for i, sequence in enumerate(sequences) if sequence.phase is not Phase.FINISHED]
    return tuple((new, by_position[old]) for new, old in enumerate(kept) if old in by_position)
