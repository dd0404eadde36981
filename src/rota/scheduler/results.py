"""The result writer records what a step did: tokens, scores, sequences that have ended, blocks that are full."""

from __future__ import annotations

from collections.abc import Callable

from rota.core.errors import Fault, FaultCode
from rota.core.events import FinishReason, Produced, PromptsScored
from rota.core.ids import RequestId
from rota.core.plan import NO_CHOICE, StepResult, TokenLogprobs
from rota.policy.step_times import StepBudget
from rota.scheduler.plan_builder import InFlightStep
from rota.scheduler.prefix import extend_keys
from rota.scheduler.sequence import Phase, Sequence
from rota.scheduler.state import SchedulerState

NOT_A_NUMBER = Fault(
    FaultCode.NOT_A_NUMBER,
    "The model computed something that is not a number, so there is no next token; weights that large are most often "
    "an adapter's, trained or scaled wrongly.",
)
NOTHING_LEFT = Fault(
    FaultCode.BAD_FIELD,
    "No token is left that may come next: the request's grammar, allowed_token_ids, bad_words and min_tokens exclude "
    "all of them together.",
)

Finish = Callable[[Sequence, FinishReason, float, Fault | None, tuple[float, ...] | None], None]


class ResultWriter:
    """Writes to sequences and to the state; `finish` ends a request."""

    def __init__(
        self, state: SchedulerState, is_caching: bool, finish: Finish, step_budget: StepBudget | None = None
    ) -> None:
        """`step_budget` is told how long steps take."""
        self._step_budget = step_budget
        self._state = state
        self._is_caching = is_caching
        self._finish = finish
        self._last_result_at = 0.0

    def write(self, step: InFlightStep, result: StepResult) -> None:
        for sequence, reached in step.chunks:
            sequence.steps_in_flight -= 1
            if sequence.holds_kv:
                sequence.computed = reached
        for sequence in step.decodes:
            sequence.steps_in_flight -= 1
            sequence.computed += 1
        if step.scored:
            self._tell_scores(step, result)
        if step.pooled:
            _add_pooled(step, result)
        self._write_tokens(step, result)
        for sequence, _ in step.chunks:
            self._publish(sequence)

    def _tell_scores(self, step: InFlightStep, result: StepResult) -> None:
        told: list[tuple[RequestId, tuple[TokenLogprobs, ...]]] = []
        end = 0
        for sequence, count in step.scored:
            start, end = end, end + count
            if sequence.phase is not Phase.FINISHED:
                told.append((sequence.request_id, result.scores[start:end]))
        assert end == len(result.scores), "a world gives one score per scored token"
        if told:
            request_ids, scores = zip(*told, strict=True)
            self._state.outbox.append(PromptsScored(result.at, request_ids, scores))

    def _write_tokens(self, step: InFlightStep, result: StepResult) -> None:
        sequences = step.decodes + step.samplers
        assert len(sequences) == len(result.tokens), "a world gives one token per sampled row"
        request_ids: list[RequestId] = []
        tokens: list[int] = []
        ended: list[tuple[Sequence, FinishReason]] = []
        untold: list[tuple[Sequence, int]] = []  # those that get no token, with their positions
        finished = Phase.FINISHED
        for at, (sequence, token) in enumerate(zip(sequences, result.tokens, strict=True)):
            if sequence.phase is finished:
                continue
            if token < 0 or sequence.pooling is not None:
                untold.append((sequence, at))
                continue
            own = sequence.tokens
            own.append(token)
            request_ids.append(sequence.request_id)
            tokens.append(token)
            if token in sequence.stop_token_ids:
                ended.append((sequence, FinishReason.STOP))
            elif len(own) >= sequence.limit:
                ended.append((sequence, FinishReason.LENGTH))
            elif sequence.computed == sequence.next_full:
                self._publish(sequence)
        if step.decodes or step.chunks:
            is_whole = len(tokens) == len(sequences)
            logprobs = result.logprobs if is_whole else _renumber(sequences, result)
            self._tell_tokens(step, result, tuple(request_ids), tuple(tokens), logprobs)
        for sequence, reason in ended:
            self._publish(sequence)
            self._finish(sequence, reason, result.at, None, None)
        for sequence, at in untold:
            self._end_untold(sequence, at, result)

    def _end_untold(self, sequence: Sequence, at: int, result: StepResult) -> None:
        if result.tokens[at] < 0:
            self._finish(sequence, FinishReason.FAILED, result.at, _fault(sequence, at, result), None)
        elif sequence.pooled:  # else it was preempted meanwhile
            self._publish(sequence)
            self._finish(sequence, FinishReason.STOP, result.at, None, _embedding(sequence))

    def _tell_tokens(
        self,
        step: InFlightStep,
        result: StepResult,
        request_ids: tuple[RequestId, ...],
        tokens: tuple[int, ...],
        logprobs: tuple[tuple[int, TokenLogprobs], ...],
    ) -> None:
        # At depth 2 the device begins a step when the step before it is done.
        at = result.at
        step_s = at - max(step.planned_at, self._last_result_at)
        self._last_result_at = at
        engine_id, prompt_tokens = self._state.engine_id, step.prompt_tokens
        self._state.note_step(step_s)
        self._state.accounts.note_step(prompt_tokens, len(step.decodes), step_s)
        if self._step_budget is not None:
            took_s = step_s if result.step_s is None else result.step_s
            self._step_budget.note(len(step.decodes), step.work, took_s)
        self._state.outbox.append(
            Produced(
                at=at,
                request_ids=request_ids,
                tokens=tokens,
                logprobs=logprobs,
                step_s=step_s,
                prompt_tokens=prompt_tokens,
                engine_id=engine_id,
            )
        )

    def _publish(self, sequence: Sequence) -> None:
        """Let other sequences find the full blocks of this sequence, and give back what no layer sees any more."""
        if not sequence.holds_kv:
            return
        size = self._state.blocks.block_size
        while sequence.next_full <= sequence.computed:
            if self._is_caching and not sequence.is_mixed:
                index = sequence.next_full // size - 1
                extend_keys(sequence, index + 1, size)
                self._state.blocks.publish(sequence.blocks[index], sequence.block_keys[index])
            sequence.next_full += size
        self._state.leave_window(sequence)


def _add_pooled(step: InFlightStep, result: StepResult) -> None:
    for sequence, vector in zip(step.pooled, result.pooled, strict=True):
        if sequence.holds_kv:  # a prompt that was preempted is computed again from its beginning
            so_far = sequence.pooled
            sequence.pooled = [a + b for a, b in zip(so_far, vector, strict=True)] if so_far else list(vector)


def _embedding(sequence: Sequence) -> tuple[float, ...]:
    if sequence.pooling == "mean":
        return tuple([one / sequence.prompt_length for one in sequence.pooled])
    return tuple(sequence.pooled)


def _fault(sequence: Sequence, at: int, result: StepResult) -> Fault:
    """Why there is no token at this position."""
    if result.tokens[at] == NO_CHOICE:
        return NOTHING_LEFT
    why = dict(result.faults).get(at)
    if why is None:
        return NOT_A_NUMBER
    grammar = sequence.request.sampling.grammar
    return Fault(FaultCode.BAD_FIELD, why, grammar.param if grammar is not None else None)


def _renumber(sequences: list[Sequence], result: StepResult) -> tuple[tuple[int, TokenLogprobs], ...]:
    """The logprobs of a result, numbered by the tokens that were kept."""
    if not result.logprobs:
        return ()
    by_position = dict(result.logprobs)
    results = zip(sequences, result.tokens, strict=True)
    kept = [
        i
        for i, (one, token) in enumerate(results)
        if one.phase is not Phase.FINISHED and token >= 0 and one.pooling is None
    ]
    return tuple((new, by_position[old]) for new, old in enumerate(kept) if old in by_position)
