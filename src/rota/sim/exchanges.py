"""Exchanges carry the prefill delayer's reports between replicas in virtual time: a board, or an all-gather.

The live ones are in `runtime/exchange`. Here no rank dies, so what is left is who waits for whom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from rota.policy.prefill_delayer import RankReport, on_board


class Board:
    """No rank waits: each goes by what the others said last."""

    def __init__(self) -> None:
        self._lines: dict[int, RankReport] = {}

    def share(self, rank: int, report: RankReport) -> list[RankReport]:
        own = self._lines[rank] = report._replace(rank=rank)
        return on_board(own, [line for other, line in self._lines.items() if other != rank])


@dataclass(slots=True, kw_only=True)
class Round:
    """A pass that all ranks make together, and the step behind it: that lasts as long as the longest rank's."""

    reports: dict[int, RankReport] = field(default_factory=dict)
    said_at: float = -math.inf  # when the last rank that has come so far came
    done_at: float = 0.0  # when the steps of all ranks are done
    is_complete: bool = False


class Rank(Protocol):
    """A rank's world, which can wait for the others."""

    def now(self) -> float: ...

    def wait_for(self, round: Round) -> None: ...


class Gathering:
    """All ranks make every pass together, idle ones too, as ranks do that share collectives."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._round = Round()

    @property
    def called_at(self) -> float:
        """When a rank that has not come was called by the first that has; never, if none has."""
        return self._round.said_at if self._round.reports else math.inf

    def share(self, rank: int, world: Rank, report: RankReport) -> list[RankReport]:
        """Waits until all ranks have come."""
        round = self._round
        round.reports[rank] = report._replace(rank=rank)
        round.said_at = max(round.said_at, world.now())
        if len(round.reports) == self._ranks:
            round.is_complete = True
            self._round = Round()
        world.wait_for(round)
        return [round.reports[number] for number in sorted(round.reports)]
