"""What a policy may see of an adapter; the scheduler's own groups fit it, and so do a test's plain values."""

from __future__ import annotations

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
        """Since when the first of them counts as waiting (priority moves it back); infinity if none does."""
        ...

    @property
    def first_token_due_at(self) -> float:
        """As `oldest_at`, but a request that holds KV and has no token yet counts too."""
        ...

    @property
    def running(self) -> int:
        """Sequences that hold KV, in a slot or parked."""
        ...

    @property
    def remaining(self) -> int:
        """The most tokens still to come among them, as far as anyone can tell."""
        ...

    @property
    def ran_at(self) -> float:
        """When its sequences were last in a step."""
        ...

    @property
    def steps(self) -> int:
        """Steps its sequences have been in, ever."""
        ...

    @property
    def slot_since(self) -> float:
        """When it got the slot it sits in."""
        ...

    def claim(self, now: float) -> float:
        """How much its running sequences deserve the device: the sum of the roots of their ages."""
        ...
