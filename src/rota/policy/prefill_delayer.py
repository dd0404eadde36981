"""The prefill delayer holds new prompts back for a moment, so that they start together and interrupt decodes less.

All data-parallel ranks decide together. Each rank shares a report, and goes by the reports that the exchange returns.
Ranks that get the same reports in every pass reach the same verdicts. A single rank exchanges with itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

RECENT_BATCHES = 16
# Delays are counted in passes. While no rank runs anything, no step makes a loop pass, so this does.
IDLE_PASS_S = 0.001
# So long a report on a board counts. A rank that has made no pass since has died, computes a long step, or is idle.
REPORT_LASTS_MS = 1000


class RankReport(NamedTuple):
    """What one rank knows before a prefill; the lowest rank's clock counts.

    A tuple, because a pass makes one for every rank: a frozen dataclass takes ten times as long to make.
    """

    is_prefillable: bool
    is_below_watermark: bool
    running: int
    largest_batch: int
    admissible: int
    is_blocked_by_adapters: bool = False
    held_ms: int = 0  # the longest time that delays have held back one request, in all
    now_ms: int = 0  # the rank's clock
    rank: int = 0  # the exchange knows the number
    has_joined: bool = False  # the exchange says so: this rank was not in the last pass

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.admissible or self.is_blocked_by_adapters)


class Exchange(Protocol):
    """Every rank's report to every rank, in rank order, each with the number of its rank."""

    def share(self, report: RankReport) -> list[RankReport]: ...


class Alone:
    """The exchange of a single rank."""

    def share(self, report: RankReport) -> list[RankReport]:
        return [report]


def on_board(own: RankReport, others: Iterable[RankReport]) -> list[RankReport]:
    """What an independent rank goes by, of all that stands on a board: ranks that are at work, by what they said last.

    A prefill on a rank that runs nothing interrupts no decode there, so that rank waits for no other. A rank without
    prompts has nothing to decide. No rank waits for one that is idle, or that has made no pass for a second.
    """
    if not own.running or not own.admissible:
        return [own]
    present = [one for one in others if not one.is_idle and abs(own.now_ms - one.now_ms) <= REPORT_LASTS_MS]
    return sorted([own, *present], key=lambda one: one.rank)


class DelayOutcome(StrEnum):
    NOTHING = ""
    NO_WAIT = "no_wait"
    DELAY = "delay"
    WAIT_SUCCESS = "wait_success"
    WAIT_TIMEOUT = "wait_timeout"
    TOKEN_WATERMARK = "token_watermark"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayVerdict:
    """Whether new prompts may start, and why; `passes` and `waited_s` say how long the delay has lasted."""

    is_allowed: bool
    reason: DelayOutcome
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
    _waited_ms: int = 0  # since the first of these passes
    _last: list[RankReport] = field(default_factory=list)  # the reports of the last pass
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
    ) -> DelayVerdict:
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
        self._catch_up(reports)
        reason = self._judge(reports)
        verdict = self._verdict(reason, reports, now)
        self._remember(reason, reports)
        return verdict

    def _catch_up(self, reports: list[RankReport]) -> None:
        """Count the time since the last pass, by the lowest rank that was in both passes: so the time that prompts have
        waited does not jump when the clock passes to another rank."""
        if any(report.has_joined for report in reports):
            # No rank can tell a newcomer how things stood, so all begin anew.
            self._passes, self._waited_ms, self._was_idle = 0, 0, True
        elif self._passes:
            before = {report.rank: report.now_ms for report in self._last}
            both = (report for report in reports if report.rank in before)
            self._waited_ms += next((max(0, report.now_ms - before[report.rank]) for report in both), 0)
        self._last = list(reports)

    def _judge(self, reports: list[RankReport]) -> DelayOutcome:
        prefillable = [report for report in reports if report.is_prefillable]
        if not prefillable:
            return DelayOutcome.NOTHING
        if any(report.is_below_watermark for report in prefillable):
            return DelayOutcome.TOKEN_WATERMARK
        if len(prefillable) == len(reports):
            if not self._wants_delay(reports):
                return DelayOutcome.WAIT_SUCCESS if self._passes else DelayOutcome.NO_WAIT
            if self._was_idle:
                return DelayOutcome.NO_WAIT
        if self._passes >= self.max_delay_passes - 1 or _longest_held_ms(reports) >= self.max_delay_ms:
            return DelayOutcome.WAIT_TIMEOUT
        return DelayOutcome.DELAY

    def _wants_delay(self, reports: list[RankReport]) -> bool:
        running = max(report.running for report in reports)
        batch = max(report.largest_batch for report in reports)
        queued = max(report.admissible for report in reports)
        if self.max_running - running < batch:
            return True
        # The time limit cancels only the condition below, never the condition above.
        waited_ms = max(self._waited_ms, _longest_held_ms(reports))
        if self.queue_min_ratio is None or waited_ms >= self.max_delay_ms:
            return False
        most = batch if self.prefill_max_requests is None else self.prefill_max_requests
        return queued < min(int(running * self.queue_min_ratio), most)

    def _verdict(self, reason: DelayOutcome, reports: list[RankReport], now: float) -> DelayVerdict:
        waited_s = self._waited_ms / 1000
        if reason is not DelayOutcome.DELAY:
            return DelayVerdict(is_allowed=True, reason=reason, passes=self._passes, waited_s=waited_s)
        # No request is held back longer than this, also if nothing else makes the loop ask again.
        left_s = (self.max_delay_ms - _longest_held_ms(reports)) / 1000
        ask_again_at = now + (left_s if any(report.running for report in reports) else min(left_s, IDLE_PASS_S))
        return DelayVerdict(
            is_allowed=False, reason=reason, passes=self._passes + 1, waited_s=waited_s, ask_again_at=ask_again_at
        )

    def _remember(self, reason: DelayOutcome, reports: list[RankReport]) -> None:
        if reason is DelayOutcome.DELAY:
            self._passes += 1
        elif reason is not DelayOutcome.NOTHING or not any(report.is_blocked_by_adapters for report in reports):
            self._passes, self._waited_ms = 0, 0
        self._was_idle = not any(report.running or report.is_prefillable for report in reports)


def _longest_held_ms(reports: list[RankReport]) -> int:
    return max(report.held_ms for report in reports)
