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
    def rows(self) -> int:
        """Those of them that have a row, and so can be in a step."""
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
    def stands_since(self) -> float:
        """Of an adapter without a slot: since when the first of its readers has no text, or will have none.

        Infinity if there is no reader.
        """
        ...

    @property
    def steps(self) -> int:
        """The number of all steps that its sequences were in."""
        ...

    @property
    def slot_since(self) -> float:
        """When it got its present slot."""
        ...

    @property
    def turn_steps(self) -> int:
        """Of these, the steps since it got its present slot."""
        ...

    @property
    def first_arrival(self) -> float:
        """When the oldest of its open requests, waiting or running, counts as arrived."""
        ...

    @property
    def is_prefilling(self) -> bool:
        """Is a prompt of it begun and not yet computed?"""
        ...

    @property
    def blocks(self) -> int:
        """KV blocks that its sequences hold."""
        ...

    @property
    def attained(self) -> int:
        """Tokens that its sequences have got, without first tokens."""
        ...

    def claim(self, now: float) -> float:
        """How strong its claim to a slot is: it grows with the age of its requests, and falls with what they need."""
        ...


class DueView(Protocol):
    """Adapters that have work and no slot, sorted in one of the ways that `AbsentView` names."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[AdapterView]:
        """First due first. There may be thousands: a policy stops when it has seen enough."""
        ...

    def __contains__(self, adapter_id: AdapterId) -> bool: ...

    def get(self, adapter_id: AdapterId) -> AdapterView | None:
        """One of them; None if this adapter has a slot or no work."""
        ...

    def rank(self, adapter_id: AdapterId) -> int:
        """How many of them come before one of them."""
        ...


class AbsentView(DueView, Protocol):
    """All of them, first due first as the slot policy says; and all or some of them in other orders."""

    @property
    def newcomers(self) -> DueView:
        """Those that wait for a first token, first come first."""
        ...

    @property
    def stalest(self) -> DueView:
        """Those that hold KV, the longest without a step first."""
        ...

    @property
    def oldest(self) -> DueView:
        """All of them, the one with the oldest open request first."""
        ...

    @property
    def largest(self) -> DueView:
        """All of them, the one with most open requests first."""
        ...


class SlotsView(Protocol):
    """The slots, the adapters in them (residents) and the adapters that have work and no slot (absent)."""

    @property
    def residents(self) -> Sequence[AdapterView]:
        """Adapters whose weights are in a slot."""
        ...

    @property
    def absent(self) -> AbsentView: ...

    def view_of(self, adapter_id: AdapterId) -> AdapterView | None:
        """An adapter wherever it is; None if it is not known any more."""
        ...

    @property
    def total(self) -> int:
        """The number of slots that are open; it changes when adapters come or go that take much room."""
        ...

    @property
    def surplus(self) -> int:
        """How many residents there are more than open slots: so many leave before another adapter can come."""
        ...

    @property
    def free(self) -> int:
        """Slots that can be given away at once: empty slots, and slots of residents that run nothing and may leave."""
        ...

    @property
    def copies(self) -> int:
        """How many copies into slots of busy residents can begin now."""
        ...

    @property
    def blocks(self) -> int:
        """All KV blocks."""
        ...

    @property
    def free_blocks(self) -> int: ...

    @property
    def adapter_blocks(self) -> int:
        """KV blocks that sequences of adapters hold; the base model's are not among them."""
        ...

    @property
    def step_s(self) -> float:
        """How long steps took recently; never zero."""
        ...

    @property
    def copy_s(self) -> float:
        """How long copies of adapters into slots took recently; 0 before the first."""
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

    def blocks_to_start(self, adapter_id: AdapterId) -> int:
        """KV blocks that the prompt of its next request takes."""
        ...

    def claimants(self) -> Iterator[AdapterView]:
        """Absent adapters that lack nothing but a slot, first due first: they hold KV, or can start a request."""
        ...


def lacks_only_a_slot(slots: SlotsView, view: AdapterView) -> bool:
    """Would the adapter run in a slot? It holds KV already, or there are KV and a row for its next request."""
    return view.running > 0 or slots.can_start(view.adapter_id)
