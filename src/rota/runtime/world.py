"""The waist: what the loop needs from a world, live or virtual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.grammar import Grammar
from rota.core.messages import Message
from rota.core.plan import StepPlan, StepResult
from rota.core.stages import Stage

Ticket = TypeVar("Ticket")


class World(Protocol[Ticket]):
    """Time, messages and a device; the loop knows nothing else."""

    def now(self) -> float: ...

    def receive(self, until: float) -> list[Message] | None:
        """New messages; waits for the first until `until`. None: no message will ever come."""
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step on the device; does not wait for its end."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step's tokens. Tickets are collected in the order of their steps."""
        ...


class Device(Protocol[Ticket]):
    """The part of a live world that computes: the engine, or a fake in tests.

    A device that inherits from this class says only what it has; the engine's room may not know the class, and has all.
    """

    @property
    def capacity(self) -> Capacity: ...

    @property
    def stages(self) -> tuple[Stage, ...]:
        """How long the parts of its building took, as far as they are known."""
        return ()

    def listen(self, post: Callable[[Message], None]) -> None:
        """From now on report adapters through `post`, from any thread."""
        ...

    def check(self, adapter: Adapter) -> str:
        """Why an unread adapter cannot be served, in a sentence; empty if nothing is known. From any thread; blocks."""
        return ""

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        """True: `then` is called once requests may follow the grammar, from any thread. False: they may now."""
        return False

    def submit(self, plan: StepPlan) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...

    def work_while_idle(self) -> bool:
        """Do a little of what can wait until there is nothing else to do; False if nothing is left to do."""
        return False

    def dismiss(self) -> None:
        """Let other ranks end, if there are any; no plan may follow."""
        return

    def close(self) -> None:
        """Dismiss other ranks, and end its own threads and processes. A process that ends needs no such call."""
        self.dismiss()
