"""The scheduler turns what happened into what to do next, and what was done into events.

It decides and never does: a plan is a value, and a world carries it out. `plan` books what it promises (rows,
blocks, slots, tokens in flight), so at depth 2 the next plan can be made before this one's tokens are known.
"""

from __future__ import annotations

import math

from rota.core.config import Capacity, EngineConfig, LoraConfig, SchedulerConfig
from rota.core.errors import ConfigError, Fault, FaultCode
from rota.core.events import CacheFlushed, Event, Finished, FinishReason, Produced, PromptsScored
from rota.core.ids import RequestId
from rota.core.messages import (
    Abort,
    AbortAll,
    AdapterFailed,
    AdapterFetched,
    AdapterReady,
    AddAdapter,
    Explain,
    FlushCache,
    Inspect,
    Message,
    RemoveAdapter,
    Submit,
)
from rota.core.plan import NO_TOKEN, StepPlan, StepResult, TokenLogprobs
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request
from rota.policy.drainer import LoRADrainer
from rota.policy.eviction import eviction
from rota.policy.prefill_delayer import PrefillDelayer
from rota.policy.rotation import LoRARotation
from rota.scheduler.adapter_lifecycle import AdapterLifecycle
from rota.scheduler.admission import Admission, extend_keys
from rota.scheduler.batch import Batch
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft, Flight
from rota.scheduler.group import Standing, waits_since
from rota.scheduler.questions import explained, inspected, refusal_of
from rota.scheduler.sequence import Phase, Refusal, Sequence
from rota.scheduler.turns import Turns

NOT_A_NUMBER = Fault(
    FaultCode.NOT_A_NUMBER,
    "The model computed something that is not a number, so there is no next token; weights that large are most often "
    "an adapter's, trained or scaled wrongly.",
)


class Scheduler:
    """The only writer of queues, ledgers and sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        policy: PolicyConfig | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        if config.chunked_prefill_size < capacity.rows:
            raise ConfigError(
                f"chunked_prefill_size is {config.chunked_prefill_size}, but {capacity.rows} running requests each "
                f"need a token a step; raise it to at least that, or lower max_running_requests."
            )
        policy, lora = policy or PolicyConfig(), lora or LoraConfig()
        self._config = config
        self._max_sequence_tokens = capacity.max_sequence_tokens
        self._vocabulary = capacity.vocabulary
        drainer, rotation = _drainer(policy, capacity), _rotation(policy)
        due_at = rotation.due_at if rotation else waits_since
        self._books = Books(capacity, eviction(lora.lora_eviction_policy), lora.max_loaded_loras, due_at)
        admission = Admission(self._books, config.enable_prefix_caching, drainer)
        self._batch = Batch(self._books, admission, _delayer(policy, capacity))
        self._turns = Turns(self._books, admission, drainer, rotation, lora.enable_lora_overlap_loading)
        self._adapters = AdapterLifecycle(self._books, self._turns, drainer)
        self._flights: dict[int, Flight] = {}
        self._steps = 0
        self._last_result_at = 0.0

    @classmethod
    def from_config(cls, config: EngineConfig, capacity: Capacity) -> Scheduler:
        return cls(config.scheduler, capacity, config.policy, config.lora)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, nobody runs, nothing is in flight."""
        return not self._books.sequences and not self._flights

    def abandon(self, at: float) -> None:
        """Whoever turned the crank was interrupted: forget steps in flight and everybody who waits for them."""
        self._flights.clear()
        self.apply(AbortAll(at))
        self._books.outbox.clear()

    # ── what happened ────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, message: Message) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case Abort(request_id, at, is_complete):
                if sequence := self._books.sequences.get(request_id):
                    self._finish(sequence, FinishReason.STOP if is_complete else FinishReason.ABORT, at)
            case AbortAll(at):
                for sequence in list(self._books.sequences.values()):
                    self._finish(sequence, FinishReason.ABORT, at)
            case AddAdapter(adapter, at):
                self._adapters.add(adapter, at)
            case RemoveAdapter(adapter_id, at, is_forced):
                self._adapters.remove(adapter_id, at, is_forced)
            case AdapterFetched(adapter_id, at):
                self._adapters.fetched(adapter_id, at)
            case AdapterReady(adapter_id, at):
                self._adapters.ready(adapter_id, at)
            case AdapterFailed():
                self._adapters.failed(message)
            case Explain(request_id, at):
                self._books.outbox.append(explained(self._books, request_id, at))
            case Inspect(at):
                self._books.outbox.append(inspected(self._books, self._steps, at))
            case FlushCache(at):
                self._books.outbox.append(CacheFlushed(at, self._books.blocks.named))
                self._books.blocks.forget()

    def _submit(self, request: Request) -> None:
        if fault := self._fault_of(request):
            at, prompt_tokens = request.arrived_at, len(request.prompt)
            self._books.outbox.append(
                Finished(request.request_id, at, FinishReason.FAILED, prompt_tokens=prompt_tokens, fault=fault)
            )
        else:
            self._books.open(request)

    def _fault_of(self, request: Request) -> Fault | None:
        books, length = self._books, len(request.prompt)
        kv_tokens = books.blocks.total * books.blocks.block_size
        group = books.groups.get(request.adapter)
        if request.request_id in books.sequences:
            return Fault(FaultCode.DUPLICATE_ID, f"A request with the id {request.request_id} is already open.")
        if group is None or group.standing is Standing.LEAVING:
            return Fault(FaultCode.UNKNOWN_ADAPTER, "The adapter this request asks for is not loaded.", "model")
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
        if self._vocabulary is not None and (largest := max(request.prompt)) >= self._vocabulary:
            # A tokenizer may know more than its model, such as a padding token; the device would not survive it.
            return Fault(
                FaultCode.BAD_FIELD,
                f"The prompt holds the token id {largest}, but the model has only {self._vocabulary} tokens.",
                "prompt",
            )
        if books.waiting >= self._config.max_queued_requests:
            most = self._config.max_queued_requests
            return Fault(FaultCode.QUEUE_FULL, f"{most} requests already wait; try again later.")
        return None

    # ── what to do ───────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, now: float) -> StepPlan:
        """Slots change hands, then the step is filled: decodes, prompts that have begun, newcomers."""
        self._steps += 1
        draft = Draft(self._steps, now, budget=self._config.chunked_prefill_size)
        self._adapters.give_orders(draft)
        self._turns.take(draft)
        self._batch.plan_decodes(draft)
        self._batch.plan_chunks(draft)
        self._batch.admit(draft)
        self._batch.settle()
        self._flights[draft.step_id] = draft.flight
        return draft.plan()

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
        if flight.scored:
            self._tell_scores(flight, result)
        self._write_tokens(flight, result)
        for sequence, _ in flight.chunks:
            self._publish(sequence)
        events, self._books.outbox = self._books.outbox, []
        return events

    def _tell_scores(self, flight: Flight, result: StepResult) -> None:
        told: list[tuple[RequestId, tuple[TokenLogprobs, ...]]] = []
        end = 0
        for sequence, count in flight.scored:
            start, end = end, end + count
            if sequence.phase is not Phase.FINISHED:
                told.append((sequence.request_id, result.scores[start:end]))
        assert end == len(result.scores), "a world gives one score per scored token"
        if told:
            request_ids, scores = zip(*told, strict=True)
            self._books.outbox.append(PromptsScored(result.at, request_ids, scores))

    def _write_tokens(self, flight: Flight, result: StepResult) -> None:
        sequences = flight.decodes + flight.samplers
        assert len(sequences) == len(result.tokens), "a world gives one token per sampled row"
        request_ids: list[RequestId] = []
        tokens: list[int] = []
        ended: list[tuple[Sequence, FinishReason]] = []
        lost: list[Sequence] = []
        dropped, finished = 0, Phase.FINISHED
        for sequence, token in zip(sequences, result.tokens, strict=True):
            if sequence.phase is finished:
                dropped += 1
                continue
            if token == NO_TOKEN:
                dropped += 1
                lost.append(sequence)
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
        if flight.decodes or flight.chunks:
            logprobs = _renumber(sequences, result) if dropped and result.logprobs else result.logprobs
            # At depth 2 the device began this step when it was done with the one before.
            step_s = result.at - max(flight.planned_at, self._last_result_at)
            self._last_result_at = result.at
            self._books.note_step(step_s)
            self._books.outbox.append(
                Produced(result.at, tuple(request_ids), tuple(tokens), logprobs, step_s, flight.prompt_tokens)
            )
        for sequence, reason in ended:
            self._publish(sequence)
            self._finish(sequence, reason, result.at)
        for sequence in lost:
            self._finish(sequence, FinishReason.FAILED, result.at, NOT_A_NUMBER)

    def _finish(self, sequence: Sequence, reason: FinishReason, at: float, fault: Fault | None = None) -> None:
        group = self._books.group_of(sequence)
        self._books.finish(sequence, reason, at, fault)
        self._adapters.retire_if_done(group, at)

    def _publish(self, sequence: Sequence) -> None:
        """Let others find the blocks of a sequence that have become full."""
        if not self._config.enable_prefix_caching or sequence.row is None:
            return
        size = self._books.blocks.block_size
        while sequence.next_full <= sequence.computed:
            index = sequence.next_full // size - 1
            extend_keys(sequence, index + 1, size)
            self._books.blocks.publish(sequence.blocks[index], sequence.block_keys[index])
            sequence.next_full += size

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    def explain(self, request_id: RequestId) -> Refusal | None:
        """Why a request waits, since when, and until when it is no use to ask; None if it does not wait."""
        return refusal_of(self._books, request_id)

    def refusals(self) -> dict[RequestId, str]:
        """Every waiting request with the reason it waits for."""
        explained = {request_id: self.explain(request_id) for request_id in self._books.sequences}
        return {request_id: refusal.reason for request_id, refusal in explained.items() if refusal}

    def check(self) -> None:
        """Assert that the books balance."""
        self._books.check()


def _drainer(policy: PolicyConfig, capacity: Capacity) -> LoRADrainer | None:
    match policy.lora_policy:
        case "drain":
            return LoRADrainer(policy.lora_drain_wait_threshold, capacity.slots)
        case "wait":
            return LoRADrainer(math.inf, capacity.slots)  # for priorities alone
        case "rotate":
            return None


def _rotation(policy: PolicyConfig) -> LoRARotation | None:
    if policy.lora_policy != "rotate":
        return None
    return LoRARotation(policy.lora_rotation_quantum_ms / 1000, policy.lora_max_stall_ms / 1000)


def _delayer(policy: PolicyConfig, capacity: Capacity) -> PrefillDelayer | None:
    if not policy.enable_prefill_delayer:
        return None
    return PrefillDelayer(
        capacity.rows,
        policy.prefill_delayer_max_delay_passes,
        policy.prefill_delayer_max_delay_ms,
        policy.prefill_delayer_token_usage_low_watermark,
        policy.prefill_delayer_queue_min_ratio,
    )


def _renumber(sequences: list[Sequence], result: StepResult) -> tuple[tuple[int, TokenLogprobs], ...]:
    """The result's logprobs by position among the tokens that were kept."""
    by_position = dict(result.logprobs)
    results = zip(sequences, result.tokens, strict=True)
    kept = [i for i, (one, token) in enumerate(results) if one.phase is not Phase.FINISHED and token != NO_TOKEN]
    return tuple((new, by_position[old]) for new, old in enumerate(kept) if old in by_position)
