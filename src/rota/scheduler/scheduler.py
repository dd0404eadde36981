"""The scheduler turns messages into plans, and results into events.

It decides and never does: a plan is a value, and a world carries it out. `plan` takes what it promises (rows, blocks,
slots, tokens in flight), so at depth 2 the next plan can be made before the tokens of this one are known.
"""

from __future__ import annotations

from collections.abc import Callable

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig, LoraConfig, SchedulerConfig
from rota.core.errors import ConfigError, Fault
from rota.core.events import CacheFlushed, Event, Explained, Finished, FinishReason, PauseChanged, Whereabouts
from rota.core.ids import FIRST_ENGINE, AdapterId, EngineId, RequestId
from rota.core.messages import (
    Abort,
    AbortAll,
    Explain,
    FlushCache,
    Inspect,
    Message,
    Pause,
    Query,
    RemoveAdapter,
    Resume,
    ServedElsewhere,
)
from rota.core.plan import StepPlan, StepResult
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request
from rota.core.standstill import STANDSTILL_S
from rota.policy.eviction import Eviction
from rota.policy.prefill_delayer import Alone, Exchange, PrefillDelayer
from rota.policy.slot_policies import make_slot_policy
from rota.policy.step_times import StepBudget
from rota.scheduler.adapters import AdapterLifecycle
from rota.scheduler.admission import Admission, Delays, RequestLimits
from rota.scheduler.batch import Batch
from rota.scheduler.newcomers import Newcomers, sit_down
from rota.scheduler.plan_builder import InFlightStep, PlanBuilder
from rota.scheduler.preemption import Sharing, Urgency
from rota.scheduler.prefill import PrefillSharing
from rota.scheduler.reads import Fetching
from rota.scheduler.results import ResultWriter
from rota.scheduler.sequence import Phase, Reason, Refusal, Sequence
from rota.scheduler.standing import Standings, Standstills, refusal_of
from rota.scheduler.state import SchedulerState
from rota.scheduler.turns import SlotCandidates, SlotMover, SlotShares, Turns

# ── pauses ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A pause stops the steps while requests stay open, and tells once the last step has ended.


class Pauses:
    """While the steps stand still, `SchedulerState.paused_at` says since when.

    A pause that drains holds new requests here, out of every queue: no policy may give a slot to a request that cannot
    start, or open requests would wait for it. Once all open requests have ended, the steps stand still, and the held
    requests wait like all others.
    """

    def __init__(self, state: SchedulerState, take: Callable[[Request], None]) -> None:
        """`take` lets a request wait in its queue, or refuses it."""
        self._state = state
        self._take = take
        self.held: dict[RequestId, Request] = {}
        self.is_draining = False
        self._is_awaited = False  # an operator waits to hear that no step is in flight

    def begin(self, at: float, is_drained: bool) -> None:
        """Stand still from now on, or drain first. The newest order counts."""
        self.is_draining, self._is_awaited = is_drained, True
        self._state.paused_at = None if is_drained else at
        if not is_drained:
            self._let_all_in()

    def end(self, at: float) -> None:
        self.is_draining = self._is_awaited = False
        self._state.paused_at = None
        self._let_all_in()
        self._tell(at, is_paused=False)

    def settle(self, at: float, is_quiet: bool) -> None:
        """A step was committed. `is_quiet`: no other is in flight."""
        if self.is_draining and is_quiet and not self._state.sequences:
            self.begin(at, is_drained=False)
        if self._is_awaited and is_quiet and not self.is_draining:
            self._is_awaited = False
            self._tell(at, is_paused=True)

    def hold(self, request: Request) -> None:
        """A request comes while others drain."""
        self.held[request.request_id] = request

    def let_in(self, adapter_id: AdapterId) -> None:
        """The held requests of one adapter count as open from now on."""
        for request in [one for one in self.held.values() if one.adapter_id == adapter_id]:
            self._take(self.held.pop(request.request_id))

    def end_held(self, request_id: RequestId, reason: FinishReason, at: float) -> None:
        """Ids that are not held are ignored."""
        if request := self.held.pop(request_id, None):
            prompt_tokens = len(request.prompt)
            ended = Finished(request_id=request_id, at=at, reason=reason, prompt_tokens=prompt_tokens)
            self._state.outbox.append(ended)

    def end_all_held(self, at: float) -> None:
        for request_id in list(self.held):
            self.end_held(request_id, FinishReason.ABORT, at)

    def explain_held(self, request_id: RequestId, at: float) -> Explained | None:
        if (request := self.held.get(request_id)) is None:
            return None
        reason, since = Reason.PAUSED.value, request.arrived_at
        return Explained(request_id=request_id, at=at, state=Whereabouts.WAITING, reason=reason, since=since)

    def _let_all_in(self) -> None:
        held, self.held = self.held, {}
        for request in held.values():
            self._take(request)

    def _tell(self, at: float, is_paused: bool) -> None:
        self._state.outbox.append(PauseChanged(at, is_paused, self._state.engine_id))


# ── lateness ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Lateness moves requests without a first token forward among those of their tenant, at the age that they name.

# A late request goes before those of its tenant that arrived up to so long before it. The bound keeps a tenant that
# calls all its requests urgent from starving its others.
LATE_HEAD_START_S = 60.0


def expect_lateness(state: SchedulerState, sequence: Sequence) -> None:
    if (age_s := sequence.request.first_token_s) is not None:
        state.punctual.put(sequence, (sequence.request.arrived_at + age_s, sequence.request_id))


def hurry(state: SchedulerState, now: float) -> None:
    """Move those that have become late.

    A late request takes no turn of a tenant that has got less, and makes no adapter's slot come sooner.
    """
    while (place := state.punctual.top()) and place[0][0] <= now:
        sequence = state.punctual.take()[2]
        if sequence.output_length:
            continue
        arrived_at, request_id = sequence.arrival
        sequence.turn = (arrived_at - LATE_HEAD_START_S, request_id)
        if sequence.phase is Phase.WAITING:
            state.group_of(sequence).queue.move(sequence)


class Scheduler:
    """The only writer of queues, ledgers and sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        policy: PolicyConfig | None = None,
        lora: LoraConfig | None = None,
        engine_id: EngineId = FIRST_ENGINE,
        exchange: Exchange | None = None,
        standstill_s: float = STANDSTILL_S,
    ) -> None:
        if config.chunked_prefill_size < capacity.rows:
            raise ConfigError(
                f"chunked_prefill_size is {config.chunked_prefill_size}, but {capacity.rows} running requests each "
                f"need a token a step; raise it to at least that, or lower max_running_requests."
            )
        policy, lora = policy or PolicyConfig(), lora or LoraConfig()
        self._config = config
        self._limits = RequestLimits(capacity.max_sequence_tokens, config.max_queued_requests, capacity.vocabulary)
        slot_policy = make_slot_policy(policy, capacity)
        eviction_policy = Eviction(lora.lora_eviction_policy)
        self._state = SchedulerState(capacity, eviction_policy, lora.max_loaded_loras, slot_policy.due_at, engine_id)
        self._state.step_tokens = config.chunked_prefill_size
        self._state.read_s = policy.read_s
        admission = Admission(self._state, config.enable_prefix_caching, slot_policy)
        self._lookup = admission.lookup
        self._batch = Batch(self._state, slot_policy, step_budget := StepBudget.of(config, capacity))
        delays = Delays(self._state, admission, _delayer(policy, capacity, config, exchange or Alone()))
        self._sharing = Sharing(self._state, admission)
        self._urgency = Urgency(self._state, admission)
        self._prompts = PrefillSharing(self._state, self._batch)
        self._newcomers = Newcomers(self._state, admission, delays, self._prompts, config.prefill_max_requests)
        is_overlapped = lora.enable_lora_overlap_loading
        fetching = Fetching(self._state, admission, slot_policy.keeps_running_at_hand)
        candidates = SlotCandidates(self._state, admission, is_overlapped)
        # With one step at a time a copy that fails would be heard of only after the step that used it.
        mover = SlotMover(self._state, is_overlapped, is_eager=config.overlap_depth > 1)
        shares = SlotShares(self._state, admission, candidates, mover)
        self._turns = Turns(self._state, admission, fetching, candidates, mover, shares, slot_policy)
        self._adapters = AdapterLifecycle(self._state, fetching, candidates, mover, slot_policy)
        self._standings = Standings(self._state, candidates, slot_policy)
        self._standstills = Standstills(self._state, self._standings, standstill_s)
        self._steps_in_flight: dict[int, InFlightStep] = {}
        self._writer = ResultWriter(self._state, config.enable_prefix_caching, self._finish, step_budget)
        self._steps = 0
        self._pauses = Pauses(self._state, self._take)

    @classmethod
    def from_config(cls, config: EngineConfig, capacity: Capacity, exchange: Exchange | None = None) -> Scheduler:
        """`exchange` carries the prefill delayer's reports between replicas; None: there is one replica."""
        lora, engine_id, standstill_s = config.lora, config.engine_id, config.standstill_s
        return cls(config.scheduler, capacity, config.policy, lora, engine_id, exchange, standstill_s)

    @property
    def is_idle(self) -> bool:
        """No request waits, no request runs, no step is in flight."""
        return not (self._state.sequences or self._steps_in_flight or self._pauses.held)

    # ── what happened ────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, message: Message) -> None:
        match message:
            case Request():
                self._submit(message)
            case Abort() | AbortAll():
                self._abort(message)
            case ServedElsewhere(tenant, prompt_tokens, decodes):
                self._state.accounts.charge_elsewhere(tenant, prompt_tokens, decodes)
            case Pause(at, is_drained):
                self._pauses.begin(at, is_drained)
            case Resume(at):
                self._pauses.end(at)
            case Explain() | Inspect() | FlushCache():
                self._answer(message)
            case _:
                if isinstance(message, RemoveAdapter):
                    self._pauses.let_in(message.adapter_id)  # an adapter leaves after all its requests
                self._adapters.apply(message)

    def _abort(self, message: Abort | AbortAll) -> None:
        at = message.at
        if isinstance(message, AbortAll):
            self._pauses.end_all_held(at)
            for sequence in list(self._state.sequences.values()):
                self._finish(sequence, FinishReason.ABORT, at)
            return
        reason = FinishReason.STOP if message.is_complete else FinishReason.ABORT
        if found := self._state.sequences.get(message.request_id):
            self._finish(found, reason, at)
        else:
            self._pauses.end_held(message.request_id, reason, at)

    def _answer(self, query: Query) -> None:
        state = self._state
        match query:
            case Explain(request_id, at):
                held = self._pauses.explain_held(request_id, at)
                state.outbox.append(held or self._standings.explained(request_id, at))
            case Inspect(at, only):
                state.outbox.append(self._standings.inspected(self._steps, at, only))
            case FlushCache(at):
                state.outbox.append(CacheFlushed(at, state.blocks.named, state.engine_id))
                state.blocks.forget()

    def _submit(self, request: Request) -> None:
        if self._pauses.is_draining and not self._fault_of(request):
            self._pauses.hold(request)
        else:
            self._take(request)

    def _fault_of(self, request: Request) -> Fault | None:
        return self._limits.fault_of(request, self._state, self._pauses.held)

    def _take(self, request: Request) -> None:
        if fault := self._fault_of(request):
            refused = Finished(
                request_id=request.request_id,
                at=request.arrived_at,
                reason=FinishReason.FAILED,
                prompt_tokens=len(request.prompt),
                fault=fault,
            )
            self._state.outbox.append(refused)
        else:
            sequence = self._state.open(request)
            expect_lateness(self._state, sequence)
            if self._config.enable_prefix_caching:
                self._lookup.expect(sequence)

    # ── what to do ───────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, now: float) -> StepPlan:
        """Give slots to adapters, then fill the step: decodes, prompts that have begun, new sequences."""
        self._steps += 1
        builder = PlanBuilder(step_id=self._steps, now=now, budget=self._config.chunked_prefill_size)
        if self._state.paused_at is None:
            self._fill(builder, now)
        else:
            # Adapters come and go during a pause: a trainer loads its next one meanwhile.
            self._adapters.give_orders(builder)
            self._adapters.go_on(builder)
        self._standstills.note(builder, self._steps_in_flight.values())
        self._steps_in_flight[builder.step_id] = builder.step
        return builder.plan()

    def _fill(self, builder: PlanBuilder, now: float) -> None:
        self._lookup.begin_pass(self._state.step_s)
        hurry(self._state, now)
        self._adapters.give_orders(builder)
        self._turns.take(builder)
        self._adapters.go_on(builder)
        self._sharing.make_room(builder)
        self._urgency.make_room(builder)
        sit_down(self._state, self._sharing, builder)
        self._batch.plan_decodes(builder)
        self._prompts.begin(builder)
        self._newcomers.admit(builder)
        self._prompts.fill(builder)
        self._batch.write_chunks(builder)
        self._batch.start_decoding()
        self._lookup.end_pass()
        if self._lookup.is_unfinished:
            builder.ask_again(now)

    # ── what was done ────────────────────────────────────────────────────────────────────────────────────────────

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Record the tokens of a step; gives the events since it was last asked for any."""
        self._writer.write(self._steps_in_flight.pop(plan.step_id), result)
        self._pauses.settle(result.at, is_quiet=not self._steps_in_flight)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """The events since it was last asked for any."""
        events, self._state.outbox = self._state.outbox, []
        return events

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        at: float,
        fault: Fault | None = None,
        embedding: tuple[float, ...] | None = None,
    ) -> None:
        group = self._state.group_of(sequence)
        self._state.finish(sequence, reason, at, fault, embedding)
        self._adapters.retire_if_done(group, at)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    def explain(self, request_id: RequestId) -> Refusal | None:
        """Why a request waits, since when, and when to ask again; None if it does not wait."""
        return refusal_of(self._state, request_id)

    def refusals(self) -> dict[RequestId, str]:
        """Every waiting request, with the reason for its wait."""
        explained = {request_id: self.explain(request_id) for request_id in self._state.sequences}
        return {request_id: refusal.reason for request_id, refusal in explained.items() if refusal}


def _delayer(
    policy: PolicyConfig, capacity: Capacity, config: SchedulerConfig, exchange: Exchange
) -> PrefillDelayer | None:
    if not policy.enable_prefill_delayer:
        return None
    return PrefillDelayer(
        max_running=capacity.rows,
        max_delay_passes=policy.prefill_delayer_max_delay_passes,
        max_delay_ms=policy.prefill_delayer_max_delay_ms,
        token_usage_low_watermark=policy.prefill_delayer_token_usage_low_watermark,
        queue_min_ratio=policy.prefill_delayer_queue_min_ratio,
        prefill_max_requests=config.prefill_max_requests,
        exchange=exchange,
    )
