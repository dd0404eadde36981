"""The leader is a device: every plan goes to the followers first and then to its own engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.errors import EngineDiedError
from rota.core.grammar import Grammar
from rota.core.messages import Message
from rota.core.plan import StepPlan, StepResult
from rota.core.stages import Stage
from rota.runtime.ranks.agreement import Agreement
from rota.runtime.ranks.listener import Listener
from rota.runtime.ranks.meeting import Meeting
from rota.runtime.world import ChecksAdapters, Device, FollowsGrammars, Ticket, stages_of


class Leader(Generic[Ticket]):
    """Rank 0's device and, behind it, those of all other ranks. The loop does not know."""

    def __init__(
        self,
        device: Device[Ticket],
        capacity: Capacity,
        meeting: Meeting,
        agreement: Agreement,
        listener: Listener,
        hang_up: Callable[[], None],
    ) -> None:
        self._device = device
        self._capacity = capacity
        self._meeting = meeting
        self._agreement = agreement
        self._listener = listener
        self._hang_up = hang_up
        self._is_torn = False

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Rank 0's: no rank is ready before the others."""
        return stages_of(self._device)

    def listen(self, post: Callable[[Message], None]) -> None:
        self._agreement.listen(post)
        self._device.listen(partial(self._agreement.note, 0))

    def check(self, adapter: Adapter) -> str:
        """Rank 0's files speak for all: a rank that cannot read the adapter says so when it does."""
        return self._device.check(adapter) if isinstance(self._device, ChecksAdapters) else ""

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        """Rank 0 alone follows grammars."""
        return isinstance(self._device, FollowsGrammars) and self._device.prepare(grammar, then)

    def submit(self, plan: StepPlan) -> Ticket:
        self._listener.check()
        if self._is_torn:
            raise EngineDiedError("A step was interrupted on rank 0 and not on the others; start all ranks again.")
        plan = self._agreement.order(plan)
        self._is_torn = True  # Ctrl-C may come between the two
        try:
            self._meeting.send_plan(plan)
            ticket = self._device.submit(plan)
        except Exception:  # whatever it is, it goes on; but a follower that is lost is the better reason
            self._listener.check_after_failure()
            raise
        self._is_torn = False
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        try:
            return self._device.collect(ticket)
        except Exception:  # as above
            self._listener.check_after_failure()
            raise

    def close(self) -> None:
        """Let the followers end; no plan may follow."""
        self._listener.close()
        self._meeting.dismiss()
        self._hang_up()
