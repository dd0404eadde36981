"""Whatever each rank sees, and whoever dies, leaves or is left out: no two ranks differ in a round."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rota.policy.prefill_delayer import DelayVerdict, PrefillDelayer, RankReport
from rota.runtime.replicas.exchange import all_gather
from rota.runtime.replicas.exchange.all_gather import AllGather, Bells
from tests.runtime.exchange.doomed import POINTS, Doomed
from tests.waiting import TIMEOUT_S, until

RANKS = 3
IDLE = RankReport(is_prefillable=False, is_below_watermark=False, running=0, largest_batch=0, admissible=0)
# What a rank was told in a round, and what it made of that.
Heard = tuple[list[RankReport], DelayVerdict]

a_pass = st.fixed_dictionaries(
    {
        "running": st.sampled_from([0, 5, 9]),
        "admissible": st.integers(0, 3),
        "token_usage": st.sampled_from([0.1, 0.9]),
        "now": st.floats(0.0, 20.0),
        "blocked_by_adapters": st.booleans(),
        "oldest_delay_s": st.sampled_from([0.0, 0.3, 0.6]),
    }
)
# Ranks stop for long in the middle of a pass, before their line or behind it.
a_stall = st.tuples(*[st.sampled_from([0.0] * 7 + [0.06])] * 2)
# From the start of a process until it dies in its last pass, or leaves after it.
a_life = st.tuples(st.lists(st.tuples(a_pass, a_stall), min_size=1, max_size=8), st.sampled_from([*POINTS, "leaves"]))


class DeadError(Exception):
    """Stands for the end of a process."""


def _die() -> NoReturn:
    raise DeadError


class Life:
    """One life of a rank: what was heard and decided in each round that this rank was in."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.heard: dict[int, Heard] = {}
        self.exchange = Doomed(folder, rank, _die)
        self.delayer = PrefillDelayer(
            max_running=10,
            max_delay_passes=4,
            max_delay_ms=500,
            queue_min_ratio=0.3,
            token_usage_low_watermark=0.05,
            exchange=self,
        )
        self.delayer.note_batch(4)

    def share(self, report: RankReport) -> list[RankReport]:
        self.reports = self.exchange.share(report)
        return self.reports

    def decide(self, seen: dict) -> None:
        verdict = self.delayer.decide(**seen)
        if self.exchange.is_member:
            self.heard[self.exchange.round - 1] = (self.reports, verdict)

    def meet_another(self, seen: dict) -> bool:
        self.decide(seen)
        return len(self.reports) > 1

    def live(self, passes: list[tuple[dict, tuple[float, float]]], ending: str) -> dict[int, Heard]:
        try:
            # Else one life would be over before the next begins.
            until(lambda: self.meet_another(passes[0][0]), within_s=0.05)
            for number, (seen, (before_s, self.exchange.stall_s)) in enumerate(passes):
                time.sleep(before_s)  # what others do meanwhile is what is tested
                if number == len(passes) - 1 and ending != "leaves":
                    self.exchange.dies_at = ending
                self.decide(seen)
            self.exchange.close()
        except DeadError:
            self.exchange.abandon()
        return self.heard


def live_all(folder: Path, rank: int, lives: list) -> list[dict[int, Heard]]:
    return [Life(folder, rank).live(passes, ending) for passes, ending in lives]


def without_clock(verdict: DelayVerdict) -> tuple:
    """When a rank asks again is by its own clock, and is no part of what ranks agree on."""
    return verdict.is_allowed, verdict.reason, verdict.passes, verdict.waited_s


def rounds_of(lives_of_ranks: list) -> dict[int, list[Heard]]:
    """All ranks live at the same time, each in a thread."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(RANKS) as pool:
        AllGather.create(Path(name), RANKS)
        rounds: dict[int, list[Heard]] = {}
        for lives in pool.map(lambda pair: live_all(Path(name), *pair), enumerate(lives_of_ranks)):
            for heard in lives:
                for number, one in heard.items():
                    rounds.setdefault(number, []).append(one)
        return rounds


# With a short time-out living ranks are left out all the time, wherever they are.
@pytest.mark.parametrize(("timeout_s", "look_s"), [(1.0, 0.005), (0.02, 0.001)])
def test_ranks_never_disagree_on_who_is_in_a_round_nor_on_its_verdict(monkeypatch, timeout_s, look_s):
    monkeypatch.setattr(all_gather, "TIMEOUT_S", timeout_s)
    monkeypatch.setattr(all_gather, "LOOK_S", look_s)
    shared = 0

    # What threads do cannot be repeated, so a failure cannot be made smaller.
    @settings(max_examples=15, deadline=None, phases=[Phase.generate], database=None)
    @given(st.lists(st.lists(a_life, min_size=1, max_size=3), min_size=RANKS, max_size=RANKS))
    def check(lives_of_ranks):
        nonlocal shared
        for heard in rounds_of(lives_of_ranks).values():
            reports, verdict = heard[0]
            assert len(heard) <= len(reports)
            for other_reports, other_verdict in heard[1:]:
                shared += 1
                assert other_reports == reports
                assert without_clock(other_verdict) == without_clock(verdict)

    check()
    assert shared > 15, "ranks did meet"


class AtLast(Doomed):
    """Lets something happen between its last look at a rank's line and the mark that leaves the rank out."""

    meanwhile: Callable[[], None]

    def _leave_out(self, rank: int) -> None:
        self.meanwhile()
        super()._leave_out(rank)


def test_a_line_that_comes_at_the_last_moment_is_in_the_round_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(all_gather, "TIMEOUT_S", 0.5)
    AllGather.create(tmp_path, 2)
    first, second = AtLast(tmp_path, 0, _die), Doomed(tmp_path, 1, _die)
    with ThreadPoolExecutor(1) as pool:
        for rank in (first, second, first):  # the first begins, and hears that the second wants to come in
            rank.share(IDLE)
        late = []

        def come() -> None:
            late.append(pool.submit(second.share, IDLE))
            assert until(lambda: second._line(1, first.round) is not None)

        first.meanwhile = come
        reports = first.share(IDLE)

        assert [report.rank for report in reports] == [0, 1]
        assert late[0].result() == reports
        assert first._marks.is_in(1), "and stays in"
    first.close()
    second.close()


class BeforeItsLine(Doomed):
    """Lets something happen between its coming in and its first line."""

    meanwhile: Callable[[], None]

    def _say(self, own: RankReport) -> None:
        self.meanwhile()
        super()._say(own)


def test_the_invitation_of_a_dead_rank_is_void_once_another_has_begun_anew(tmp_path):
    AllGather.create(tmp_path, 3)
    first, second, third = (kind(tmp_path, rank, _die) for rank, kind in enumerate((Doomed, BeforeItsLine, Doomed)))
    for rank in (first, third, first):  # the last of these passes invites the third
        rank.share(IDLE)
    first.abandon()
    alone = []
    second.meanwhile = lambda: alone.append((third.share(IDLE), third.is_member))
    second.share(IDLE)
    assert second.is_member, "nobody who lives was in"
    assert alone == [([IDLE._replace(rank=2)], False)]

    second.meanwhile = lambda: None
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(third.share, IDLE)
        reports = second.share(IDLE)
        assert [report.rank for report in reports] == [1, 2]
        assert other.result() == reports
    second.close()
    third.close()


def test_a_death_is_noticed_though_others_ring_all_the_time(tmp_path, monkeypatch):
    # A living rank would be waited for much longer than this test lasts.
    monkeypatch.setattr(all_gather, "TIMEOUT_S", 2 * TIMEOUT_S)
    AllGather.create(tmp_path, 3)
    first, second = Doomed(tmp_path, 0, _die), Doomed(tmp_path, 1, _die)
    with ThreadPoolExecutor(2) as pool:
        for rank in (first, second, first):  # the first begins, and hears that the second wants to come in
            rank.share(IDLE)
        both = pool.submit(second.share, IDLE)
        assert len(first.share(IDLE)) == len(both.result()) == 2
        second.abandon()
        bells, is_over = Bells(tmp_path, 2, 3), threading.Event()

        def ring() -> None:
            while not is_over.wait(0.001):
                bells.ring()

        ringing = pool.submit(ring)
        try:
            reports = pool.submit(first.share, IDLE).result(TIMEOUT_S)
        finally:
            is_over.set()
        ringing.result()

    assert [report.rank for report in reports] == [0]
    first.close()
    bells.close()
