"""A replica has a virtual world beside others: where it would jump ahead, it first lets the others come as far."""

from __future__ import annotations

import math
from collections import deque

from rota.core.messages import Message
from rota.core.plan import StepPlan, StepResult
from rota.policy.prefill_delayer import RankReport
from rota.sim.baton import Baton
from rota.sim.cost import CostModel
from rota.sim.exchanges import Board, Gathering, Round
from rota.sim.world import Finish, PagesOf, VirtualWorld


class ReplicaWorld(VirtualWorld):
    """Waits for messages, for steps, and in a gathering for the other ranks; `due_at` says until when."""

    def __init__(
        self,
        number: int,
        baton: Baton,
        costs: CostModel,
        fetch_s: float,
        exchange: Board | Gathering | None,
        pages_of: PagesOf | None = None,
    ) -> None:
        super().__init__((), costs, fetch_s=fetch_s, pages_of=pages_of)
        self._number = number
        self._baton = baton
        self._exchange = exchange
        self._until = 0.0
        self._step: Finish | None = None  # while the loop waits for a step
        self._awaited: Round | None = None  # while the loop waits for the other ranks
        self._round: Round | None = None  # the last that this rank was in
        self._flying: deque[Round] = deque()  # whose steps are in flight

    @property
    def due_at(self) -> float:
        if self._awaited is not None:
            return max(self._now, self._awaited.said_at) if self._awaited.is_complete else math.inf
        if self._step is not None:
            return max(self._now, self._done_at(self._step))
        called_at = self._exchange.called_at if isinstance(self._exchange, Gathering) else math.inf
        return max(self._now, min(self.next_at, self._until, called_at))

    def post(self, at: float, message: Message) -> None:
        super().post(at, message)
        self._baton.note(self)

    def receive(self, until: float) -> list[Message] | None:
        self._until = until
        self._baton.wait(self)
        return super().receive(min(until, self.due_at))

    def submit(self, plan: StepPlan) -> Finish:
        finish = super().submit(plan)
        if self._round is not None:
            self._round.done_at = max(self._round.done_at, finish[0])
            self._flying.append(self._round)
        return finish

    def collect(self, ticket: Finish) -> StepResult:
        self._step = ticket
        self._baton.wait(self)
        self._step, done_at = None, self._done_at(ticket)
        if self._flying:
            self._flying.popleft()
        return super().collect((done_at, ticket[1], ticket[2]))

    def _done_at(self, ticket: Finish) -> float:
        """When a step is done; ranks that make their passes together also end their steps together."""
        return max(ticket[0], self._flying[0].done_at) if self._flying else ticket[0]

    def share(self, report: RankReport) -> list[RankReport]:
        if isinstance(self._exchange, Gathering):
            return self._exchange.share(self._number, self, report)
        return self._exchange.share(self._number, report) if self._exchange else [report]

    def wait_for(self, round: Round) -> None:
        self._awaited = round
        self._baton.note_all()  # it calls the others, or is the last one that they wait for
        self._baton.wait(self)
        self._awaited = None
        self._now = max(self._now, round.said_at)
        if self._round is not None:
            # All ranks have planned again, so all have given the device their steps of the round before.
            self._device_free_at = max(self._device_free_at, self._round.done_at)
        self._round = round
