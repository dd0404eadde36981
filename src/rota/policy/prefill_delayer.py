"""The prefill delayer holds new prompts back for a moment, so that they enter together and interrupt decodes less.

All data-parallel ranks decide together: each puts five integers on the table, one exchange later every rank
holds all of them and reaches the same verdict. A single rank exchanges with itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

RECENT_BATCHES = 16


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank knows before it prefills; times travel as whole milliseconds of the first rank's clock."""

    is_prefillable: bool
    is_below_watermark: bool
    running: int
    largest_batch: int
    admissible: int
    now_ms: int = 0


class Exchange(Protocol):
    """Every rank's report to every rank, in rank order."""

    def share(self, report: RankReport) -> list[RankReport]: ...


class Alone:
    """The exchange of a single rank."""

    def share(self, report: RankReport) -> list[RankReport]:
        return [report]


class Outcome(StrEnum):
    NOTHING = ""
    NO_WAIT = "no_wait"
    DELAY = "delay"
    WAIT_SUCCESS = "wait_success"
    WAIT_TIMEOUT = "wait_timeout"
    TOKEN_WATERMARK = "token_watermark"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether new prompts may start, and why; `passes` and `waited_s` tell how long the delay has lasted."""

    is_allowed: bool
    reason: Outcome
    passes: int = 0
    waited_s: float = 0.0
    ask_again_at: float = float("inf")


@dataclass(slots=True)
class PrefillDelayer:
    """Asked once a pass, also by a rank that has nothing to prefill."""

    max_running: int
    max_delay_passes: int = 30
    max_delay_ms: float = 5000.0
    token_usage_low_watermark: float | None = None
    queue_min_ratio: float | None = None
    prefill_max_requests: int | None = None
    exchange: Exchange = field(default_factory=Alone)
    _passes: int = 0
    _started_ms: int | None = None
    _was_idle: bool = True
    _batches: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_BATCHES))

    def note_batch(self, prompts: int) -> None:
        """A prefill of so many prompts was attempted."""
        self._batches.append(prompts)

    def decide(
        self,
        running: int,
        admissible: int,
        token_usage: float,
        now: float,
        blocked_by_adapters: bool = False,
        oldest_delay_s: float = 0.0,
    ) -> Verdict:
        """May new prompts start? `admissible` counts requests that could run now, not those whose adapter is absent.

        `oldest_delay_s` is how long delays have held the first of them back in all.
        """
        watermark = self.token_usage_low_watermark
        report = RankReport(
            is_prefillable=admissible > 0,
            is_below_watermark=admissible > 0 and watermark is not None and token_usage < watermark,
            running=running,
            largest_batch=max(self._batches, default=0),
            admissible=admissible,
            now_ms=int(now * 1000),
        )
        reports = self.exchange.share(report)
        verdict = self._judge(reports, now, blocked_by_adapters, oldest_delay_s)
        if verdict.is_allowed and not (verdict.reason is Outcome.NOTHING and blocked_by_adapters):
            self._passes, self._started_ms = 0, None
        self._was_idle = not any(one.running or one.is_prefillable for one in reports)
        return verdict

    def _judge(
        self, reports: list[RankReport], now: float, blocked_by_adapters: bool, oldest_delay_s: float
    ) -> Verdict:
        prefillable = sum(report.is_prefillable for report in reports)
        if not prefillable:
            return Verdict(True, Outcome.NOTHING)
        # One clock for all: the first rank's.
        now_ms = reports[0].now_ms
        waited_ms = 0 if self._started_ms is None else now_ms - self._started_ms
        waited = {"passes": self._passes, "waited_s": waited_ms / 1000}
        if any(report.is_prefillable and report.is_below_watermark for report in reports):
            return Verdict(True, Outcome.TOKEN_WATERMARK, **waited)  # type: ignore[arg-type]
        if prefillable == len(reports):
            if not self._wants_delay(reports, max(waited_ms, oldest_delay_s * 1000)):
                reason = Outcome.WAIT_SUCCESS if self._passes else Outcome.NO_WAIT
                return Verdict(True, reason, **waited)  # type: ignore[arg-type]
            if self._was_idle:
                return Verdict(True, Outcome.NO_WAIT)
        if self._passes >= self.max_delay_passes - 1 or oldest_delay_s * 1000 >= self.max_delay_ms:
            return Verdict(True, Outcome.WAIT_TIMEOUT, **waited)  # type: ignore[arg-type]
        if self._started_ms is None:
            self._started_ms = now_ms
        self._passes += 1
        return Verdict(False, Outcome.DELAY, self._passes, waited_ms / 1000, now + self.max_delay_ms / 1000)

    def _wants_delay(self, reports: list[RankReport], waited_ms: float) -> bool:
        running = max(report.running for report in reports)
        batch = max(report.largest_batch for report in reports)
        queued = max(report.admissible for report in reports)
        too_few_slots = self.max_running - running < batch
        if too_few_slots or self.queue_min_ratio is None:
            return too_few_slots
        ceiling = self.prefill_max_requests if self.prefill_max_requests is not None else batch
        enough = min(int(running * self.queue_min_ratio), ceiling)
        # The clock cancels only this condition, never the one about slots.
        return running > 0 and enough > 0 and queued < enough and waited_ms < self.max_delay_ms
