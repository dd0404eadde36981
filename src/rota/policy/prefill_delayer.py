"""The prefill delayer holds new prompts back for a moment, so that they start together and interrupt decodes less.

All data-parallel ranks decide together. Each rank shares a report. After one exchange every rank has all reports and
reaches the same verdict. A single rank exchanges with itself.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

RECENT_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank knows before a prefill; all ranks decide by the same reports, and by the first rank's clock."""

    is_prefillable: bool
    is_below_watermark: bool
    running: int
    largest_batch: int
    admissible: int
    is_blocked_by_adapters: bool = False
    held_ms: int = 0  # the longest time that delays have held back one request, in all
    now_ms: int = 0  # only the first rank's clock counts


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether new prompts may start, and why; `passes` and `waited_s` say how long the delay has lasted."""

    is_allowed: bool
    reason: Outcome
    passes: int = 0
    waited_s: float = 0.0
    ask_again_at: float = math.inf


@dataclass(slots=True, kw_only=True)
class PrefillDelayer:
    """Every rank asks once a pass, also a rank that has nothing to prefill."""

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
        """A prefill of this many prompts was attempted."""
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
        """May new prompts start? `admissible` counts requests that could run now, not requests of absent adapters.

        `oldest_delay_s` is how long delays have held back the first of these requests, in all.
        """
        watermark = self.token_usage_low_watermark
        reports = self.exchange.share(
            RankReport(
                is_prefillable=admissible > 0,
                is_below_watermark=watermark is not None and token_usage < watermark,
                running=running,
                largest_batch=max(self._batches, default=0),
                admissible=admissible,
                is_blocked_by_adapters=blocked_by_adapters,
                held_ms=math.ceil(oldest_delay_s * 1000),
                now_ms=int(now * 1000),
            )
        )
        reason = self._judge(reports)
        verdict = self._verdict(reason, reports, now)
        self._remember(reason, reports)
        return verdict

    def _judge(self, reports: list[RankReport]) -> Outcome:
        prefillable = [report for report in reports if report.is_prefillable]
        if not prefillable:
            return Outcome.NOTHING
        if any(report.is_below_watermark for report in prefillable):
            return Outcome.TOKEN_WATERMARK
        if len(prefillable) == len(reports):
            if not self._wants_delay(reports):
                return Outcome.WAIT_SUCCESS if self._passes else Outcome.NO_WAIT
            if self._was_idle:
                return Outcome.NO_WAIT
        if self._passes >= self.max_delay_passes - 1 or _longest_held_ms(reports) >= self.max_delay_ms:
            return Outcome.WAIT_TIMEOUT
        return Outcome.DELAY

    def _wants_delay(self, reports: list[RankReport]) -> bool:
        running = max(report.running for report in reports)
        batch = max(report.largest_batch for report in reports)
        queued = max(report.admissible for report in reports)
        if self.max_running - running < batch:
            return True
        # The time limit cancels only the condition below, never the condition above.
        waited_ms = max(self._waited_ms(reports), _longest_held_ms(reports))
        if self.queue_min_ratio is None or waited_ms >= self.max_delay_ms:
            return False
        most = batch if self.prefill_max_requests is None else self.prefill_max_requests
        return queued < min(int(running * self.queue_min_ratio), most)

    def _verdict(self, reason: Outcome, reports: list[RankReport], now: float) -> Verdict:
        waited_s = self._waited_ms(reports) / 1000
        if reason is not Outcome.DELAY:
            return Verdict(is_allowed=True, reason=reason, passes=self._passes, waited_s=waited_s)
        # No request is held back longer than this, also if nothing else makes the loop ask again.
        ask_again_at = now + (self.max_delay_ms - _longest_held_ms(reports)) / 1000
        return Verdict(
            is_allowed=False, reason=reason, passes=self._passes + 1, waited_s=waited_s, ask_again_at=ask_again_at
        )

    def _remember(self, reason: Outcome, reports: list[RankReport]) -> None:
        if reason is Outcome.DELAY:
            self._started_ms = reports[0].now_ms if self._started_ms is None else self._started_ms
            self._passes += 1
        elif reason is not Outcome.NOTHING or not any(report.is_blocked_by_adapters for report in reports):
            self._passes, self._started_ms = 0, None
        self._was_idle = not any(report.running or report.is_prefillable for report in reports)

    def _waited_ms(self, reports: list[RankReport]) -> int:
        return 0 if self._started_ms is None else reports[0].now_ms - self._started_ms


def _longest_held_ms(reports: list[RankReport]) -> int:
    return max(report.held_ms for report in reports)
