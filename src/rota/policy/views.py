"""Views are what a policy may see; the scheduler's groups and slots fit them, and so do plain values of a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from rota.core.ids import AdapterId


class AdapterView(Protocol):
    """One adapter's requests, counted as they come and go."""

    @property
    def adapter_id(self) -> AdapterId: ...

    @property
    def weight(self) -> float:
        """Its share of slot time relative to others."""
        ...

    @property
    def is_pinned(self) -> bool:
        """Whether it keeps its slot whatever happens."""
        ...

    @property
    def priority(self) -> int:
        """The highest among its sequences that run and the request that would start next."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that hold nothing yet."""
        ...

    @property
    def oldest_at(self) -> float:
        """When the first of them counts as arrived (priority makes that earlier); infinity if none waits."""
        ...

    @property
    def first_token_due_at(self) -> float:
        """As `oldest_at`, but requests that hold KV and have no token yet count too."""
        ...

    @property
    def running(self) -> int:
        """Sequences that hold KV, in a slot or parked."""
        ...

    @property
    def remaining(self) -> int:
        """The most tokens that one of them still has to make, estimated from earlier answers."""
        ...

    @property
    def most_remaining(self) -> int:
        """As `remaining`, but estimated from the longest of many earlier answers, or else the limit."""
        ...

    @property
    def seated_in(self) -> int:
        """The value of `steps` when the first of them sat down."""
        ...

    @property
    def prompt_left(self) -> int:
        """The most tokens of one of their prompts that are still to be computed."""
        ...

    @property
    def ran_at(self) -> float:
        """When its sequences were last in a step."""
        ...

    @property
    def steps(self) -> int:
        """The number of all steps that its sequences were in."""
        ...

    @property
    def slot_since(self) -> float:
        """When it got its present slot."""
        ...

    def claim(self, now: float) -> float:
        """How strong its claim to a slot is: the sum of the square roots of the ages of its running sequences."""
        ...


class DueView(Protocol):
    """Adapters that have work and no slot, sorted by when the slot policy says that they are due."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[AdapterView]:
        """First due first. There may be thousands: a policy stops when it has seen enough."""
        ...

    def get(self, adapter_id: AdapterId) -> AdapterView | None:
        """One of them; None if this adapter has a slot or no work."""
        ...


class SlotsView(Protocol):
    """The slots, the adapters in them (residents) and the adapters that have work and no slot (absent)."""

    @property
    def residents(self) -> Sequence[AdapterView]:
        """Adapters whose weights are in a slot."""
        ...

    @property
    def absent(self) -> DueView: ...

    @property
    def free(self) -> int:
        """Slots that can be given away at once: empty slots, and slots of residents that run nothing and may leave."""
        ...

    @property
    def landings(self) -> int:
        """How many copies into slots of busy residents can begin now."""
        ...

    @property
    def step_s(self) -> float:
        """How long steps took recently."""
        ...

    @property
    def step_tokens(self) -> int:
        """How many tokens a step may compute."""
        ...

    @property
    def has_priorities(self) -> bool:
        """Whether the open requests differ in priority."""
        ...

    def may_leave(self, adapter_id: AdapterId) -> bool:
        """Whether a resident can be made to leave: not pinned, not leaving already, not waiting for its first step."""
        ...

    def is_at_hand(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter's weights lie in host memory, from where they can be copied into a slot."""
        ...

    def is_being_read(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter's weights are on their way from disk into host memory."""
        ...

    def can_start(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter's next request lacks nothing but a slot: there are KV and a row for it."""
        ...

    def claimants(self) -> Iterator[AdapterView]:
        """Absent adapters that lack nothing but a slot, first due first: they hold KV, or can start a request."""
        ...
