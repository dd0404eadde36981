"""The waist: what the loop needs from a world, live or virtual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

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
    """The part of a live world that computes: the engine, or a fake in tests."""

    @property
    def capacity(self) -> Capacity: ...

    def listen(self, post: Callable[[Message], None]) -> None:
        """From now on report adapters through `post`, from any thread."""
        ...

    def submit(self, plan: StepPlan) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...


@runtime_checkable
class ChecksAdapters(Protocol):
    """A device that can say what speaks against an adapter without reading it."""

    def check(self, adapter: Adapter) -> str:
        """Why the adapter cannot be served, in a sentence; empty if nothing is known. From any thread; blocks."""
        ...


@runtime_checkable
class TellsStages(Protocol):
    """A device that knows how long the parts of its building took."""

    @property
    def stages(self) -> tuple[Stage, ...]: ...


def stages_of(device: object) -> tuple[Stage, ...]:
    """The stages of a device's building; none if it does not know them."""
    return device.stages if isinstance(device, TellsStages) else ()


@runtime_checkable
class LeadsRanks(Protocol):
    """A device with other ranks behind it."""

    def dismiss(self) -> None:
        """Let the others end; no plan may follow."""
        ...


@runtime_checkable
class FollowsGrammars(Protocol):
    """A device that may need time for a grammar before a request with it can run."""

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        """True: `then` is called once the grammar is ready, from any thread. False: it is ready."""
        ...


@runtime_checkable
class WorksWhileIdle(Protocol):
    """A device with work that can wait until there is nothing else to do."""

    def work_while_idle(self) -> bool:
        """Do a little of it; False if nothing is left to do."""
        ...
