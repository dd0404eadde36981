"""A plan that is being made, with the sequences behind its rows and the prompts that did not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId, Row
from rota.core.plan import Chunk, Grant, Load, Pool, Scoring, Seat, StepPlan
from rota.policy.prefill_budget import PrefillSplit
from rota.scheduler.accounts import Account
from rota.scheduler.sequence import Sequence

# ── prefill backlog ─────────────────────────────────────────────────────────────────────────────────────────────────
# A prefill backlog is the prompts of one tenant that have begun and do not fit into its part of a step.


@dataclass(slots=True)
class PrefillBacklog:
    """What is planned for it in one pass."""

    split: PrefillSplit[Sequence]
    left: int  # tokens of the tenant's part that are not planned yet
    overtook: int = 0  # tokens that are planned for others than the oldest prompt

    def note(self, sequence: Sequence, tokens: int) -> None:
        """This many tokens of a sequence are planned."""
        self.left = max(0, self.left - tokens)
        if sequence is not self.split.oldest:
            self.overtook += tokens

    def settle(self) -> None:
        """The pass is over: the oldest prompt has yielded to the others, if it goes on."""
        oldest = self.split.oldest
        if oldest.rest:
            oldest.yielded += self.overtook


# ── plan builder ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class InFlightStep:
    """The sequences in a step, and when the step was planned."""

    planned_at: float
    decodes: list[Sequence] = field(default_factory=list)
    # Each with the number of tokens that are computed after its chunk.
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    samplers: list[Sequence] = field(default_factory=list)
    # Each with the number of prompt tokens that are scored.
    scored: list[tuple[Sequence, int]] = field(default_factory=list)
    pooled: list[Sequence] = field(default_factory=list)  # those whose chunk's hidden states are wanted
    prompt_tokens: int = 0
    work: float = 0.0  # of the prompts: their tokens, those behind a prefix counted for more


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """The scheduler's parts fill it, one after the other."""

    step_id: int
    now: float
    budget: int  # tokens that the step may still take
    step: InFlightStep = field(init=False)
    invited: list[Sequence] = field(default_factory=list)  # waiting sequences for which others made room
    seats: list[Seat] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    # Tokens of the step that decodes leave for prompts.
    prompt_budget: int = field(init=False, repr=False, compare=False)
    work: float = math.inf  # work that prompts behind a prefix may still take; see `policy.prefill_budget`
    time: float = math.inf  # work of any prompts for which the step still has time; see `policy.step_times`
    portions: dict[Sequence, int] = field(default_factory=dict)  # prompt tokens by sequence; chunks are made of them
    backlogs: dict[Account, PrefillBacklog] = field(
        default_factory=dict
    )  # tenants whose begun prompts do not fit into the step
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Row] = field(default_factory=list)
    fetches: list[Adapter] = field(default_factory=list)
    idle_fetches: list[Adapter] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    drops: list[AdapterId] = field(default_factory=list)
    scorings: list[Scoring] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    context_tokens: int = 0
    adapters: int = 0
    wake_at: float = math.inf

    def __post_init__(self) -> None:
        self.step = InFlightStep(planned_at=self.now)

    def ask_again(self, at: float) -> None:
        """The scheduler's answer will change at this moment, without a message."""
        self.wake_at = min(self.wake_at, at)

    def plan(self) -> StepPlan:
        return StepPlan(
            step_id=self.step_id,
            seats=tuple(self.seats),
            grants=tuple(self.grants),
            chunks=tuple(self.chunks),
            decodes=tuple(self.decodes),
            fetches=tuple(self.fetches),
            idle_fetches=tuple(self.idle_fetches),
            loads=tuple(self.loads),
            drops=tuple(self.drops),
            scorings=tuple(self.scorings),
            pools=tuple(self.pools),
            context_tokens=self.context_tokens,
            adapters=self.adapters,
            wake_at=self.wake_at,
        )
