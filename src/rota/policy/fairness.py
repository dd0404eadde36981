"""Fairness shares the device between tenants: by what each tenant has got so far, and by what each holds now.

Two rules, and both count by weight. The tenant that has got least goes first when a request may start. A tenant that
holds less than its share of rows or KV blocks may take room from a tenant that holds more than its share. The first
rule shares the device over time. The second rule acts at once: a tenant that comes late need not wait until the
answers of others end. Nothing is set aside, so a tenant that is alone uses the whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

# The cost of one token of a prompt is the unit. A token of an answer costs its part of a step that reads all weights:
# by the cost model of an H200, 4.2 units among 256 rows and 6.8 units among 64 rows.
DECODE_UNITS = 4


class TenantView(Protocol):
    """One tenant with open requests."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float:
        """Its share relative to others."""
        ...

    @property
    def seats(self) -> int:
        """Sequences that hold KV, with a row or without."""
        ...


View = TypeVar("View", bound=TenantView)


def units(prompt_tokens: int, decodes: int) -> int:
    """What a tenant's part of a step costs."""
    return prompt_tokens + DECODE_UNITS * decodes


def joins_at(own_s: float, others_s: Iterable[float]) -> float:
    """The service from which a tenant counts when it comes back: time without work is not saved up."""
    return max(own_s, min(others_s, default=0.0))


def share(view: TenantView, weights: float, total: int) -> float:
    """A tenant's share of `total`, where `weights` is the sum over all tenants with open requests."""
    return total * view.weight / weights


def may_take(view: TenantView, weights: float, total: int, held: int, more: int) -> bool:
    """May a tenant that holds `held` of `total` take `more` from others?

    A tenant without a seat may always: else a request that is larger than the share of its tenant would starve.
    """
    return held + more <= share(view, weights, total) or not view.seats


def gives_up(
    views: Iterable[View], taker: TenantView | None, weights: float, total: int, held: Callable[[View], int]
) -> View | None:
    """The tenant that makes room for `taker`, or for any other: it holds most for its weight, more than its share.

    For a tenant without a seat, others go below their share too, or a large request would starve. No tenant gives up
    its last sequence. So every tenant moves on, and two large requests do not push each other out.
    """
    is_starving = taker is not None and not taker.seats
    others = (view for view in views if view is not taker and view.seats > 1)
    able = [view for view in others if is_starving or held(view) > share(view, weights, total)]
    return max(able, key=lambda view: (held(view) / view.weight, view.name), default=None)
