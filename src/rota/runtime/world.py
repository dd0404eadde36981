"""The waist: what the loop may ask of a world, live or virtual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from rota.core.config import Capacity
from rota.core.messages import Message
from rota.core.plan import StepPlan, StepResult

Ticket = TypeVar("Ticket")


class World(Protocol[Ticket]):
    """Time, messages and a device; the loop knows nothing else."""

    def now(self) -> float: ...

    def receive(self, until: float) -> list[Message] | None:
        """What came; waits for something until `until`. None: nothing will ever come."""
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step on the device; does not wait for it."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step's tokens. Tickets are collected in the order they were given."""
        ...


class Device(Protocol[Ticket]):
    """The half of a live world that computes; the engine is one, a test's fake another."""

    @property
    def capacity(self) -> Capacity: ...

    def listen(self, post: Callable[[Message], None]) -> None:
        """From now on tell of adapters through `post`, from whatever thread."""
        ...

    def submit(self, plan: StepPlan) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...
