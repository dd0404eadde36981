"""A standstill: requests are open, and no step has computed anything for long."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.ids import FIRST_ENGINE, EngineId, RequestId

# The engine tells of a standstill that lasts so long.
STANDSTILL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoodStill:
    """An engine has computed nothing for long, and why its open requests wait. It is told again if it lasts."""

    at: float
    since: float
    requests: int  # that are open
    reasons: tuple[tuple[RequestId, str], ...] = ()  # why the oldest of them wait
    # What is under way for them, in words. Empty: nothing, and only a message from outside could end this.
    waits_for: str = ""
    is_news: bool = True  # False: the same was told before, and lasts
    engine_id: EngineId = FIRST_ENGINE

    @property
    def is_stuck(self) -> bool:
        return not self.waits_for

    @property
    def kind(self) -> str:
        return "stuck" if self.is_stuck else "waiting"

    @property
    def still_s(self) -> float:
        return self.at - self.since

    def sentence(self, now: float) -> str:
        """Clients without a key may read it, so it does not say how many requests there are."""
        cause = self.waits_for or "nothing that is under way"
        return f"No step for {now - self.since:.0f} seconds, while requests wait for {cause}."


@dataclass(frozen=True, slots=True)
class WentOn:
    """A standstill that was told of is over: a step was planned, no request is open, or the engine is paused."""

    at: float
    still_s: float
    engine_id: EngineId = FIRST_ENGINE
