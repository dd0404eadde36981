"""Ranks that share collectives: whatever each sees and whoever dies, comes or is left out, no two differ in a round."""

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

from rota.policy.prefill_delayer import DelayOutcome, DelayVerdict, PrefillDelayer, RankReport
from rota.runtime.replicas.exchange import all_gather
from rota.runtime.replicas.exchange.all_gather import AllGather, Bells
from tests.runtime.exchange.crew import LIVING_S, RANKS, Crew, crew_of
from tests.runtime.exchange.doomed import POINTS, Doomed
from tests.waiting import TIMEOUT_S, until

EVERYONE = range(RANKS)
# Twice as long as ranks are waited for otherwise: a rank that is itself held up for so long would leave the round.
LEFT_OUT_AFTER_S = 2 * all_gather.TIMEOUT_S


@pytest.fixture(scope="module")
def crew():
    with crew_of("all-gather") as crew:
        crew.meet()
        yield crew


def said(rank: int, **fields) -> dict:
    """Another report for each rank."""
    return {
        "is_prefillable": bool(rank % 2),
        "is_below_watermark": rank == 2,
        "running": 10 + rank,
        "largest_batch": 20 + rank,
        "admissible": 30 + rank,
        "is_blocked_by_adapters": rank == 3,
        "held_ms": 2**31 + rank,
        "now_ms": 2**40 + rank,
        **fields,
    }


def share(crew: Crew, ranks) -> dict:
    """One round of these ranks, which must all see the same."""
    answers = crew.order(ranks, "share", *(said(rank) for rank in ranks))
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_all_get_the_reports_of_all_in_rank_order(crew):
    first, second = share(crew, EVERYONE), share(crew, EVERYONE)

    assert first["reports"] == [{**said(rank), "rank": rank, "has_joined": False} for rank in EVERYONE]
    assert second["round"] == first["round"] + 1


def test_nobody_goes_on_before_the_last_has_come(crew):
    for rank in (0, 1, 2):
        crew.begin(rank, "share", **said(rank))
    began_at = time.monotonic()
    time.sleep(0.3)  # time is what is tested: the others wait for the last
    crew.begin(3, "share", **said(3))
    answers = [crew.end(rank) for rank in EVERYONE]

    assert [len(answer["reports"]) for answer in answers] == [RANKS] * RANKS
    assert time.monotonic() - began_at >= 0.3


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_that_dies_in_the_middle_of_a_round_leaves_it_and_the_others_agree(crew, point, rank):
    crew.order([rank], "doom", {"point": point})
    survivors = [other for other in EVERYONE if other != rank]
    for one in EVERYONE:
        crew.begin(one, "share", **said(one))
    # In time: for a rank that lives they would wait longer than their answers are waited for.
    answers = [crew.end(one) for one in survivors]
    crew.wait_for_death(rank)

    assert all(answer == answers[0] for answer in answers), "whether the dead was in or not"
    was_in = point in POINTS[2:]
    assert [one["rank"] for one in answers[0]["reports"]] == (list(EVERYONE) if was_in else survivors)
    next_round = share(crew, survivors)
    assert [one["rank"] for one in next_round["reports"]] == survivors
    assert next_round["round"] == answers[0]["round"] + 1

    crew.restart(rank)
    crew.meet()
    assert [one["now_ms"] for one in share(crew, EVERYONE)["reports"]] == [2**40 + one for one in EVERYONE]


def test_the_clock_passes_to_the_lowest_rank_that_lives_and_the_time_waited_does_not_jump(crew):
    crew.order(EVERYONE, "new", {"batch": 4, "max_running": 200, "queue_min_ratio": 0.1, "max_delay_ms": 500})

    def decide(ranks, at: float) -> list:
        """Forty run and one waits, where four are wanted; the ranks' clocks differ by far."""
        seen = {"running": 40, "admissible": 1, "token_usage": 0.9}
        answers = crew.order(ranks, "decide", *({**seen, "now": at + 1000.0 * (3 - rank)} for rank in ranks))
        assert all(answer == answers[0] for answer in answers)
        return [answers[0]["reason"], answers[0]["waited_s"]]

    crew.order(EVERYONE, "decide", {"running": 1, "admissible": 0, "token_usage": 0.9, "now": 0.0})
    assert decide(EVERYONE, at=1.0) == [DelayOutcome.DELAY, 0.0]
    assert decide(EVERYONE, at=1.2) == [DelayOutcome.DELAY, 0.2]
    crew.order([0], "doom", {"point": "before its line"})
    crew.begin(0, "share", **said(0))
    assert decide([1, 2, 3], at=1.3) == [DelayOutcome.DELAY, 0.3]
    assert decide([1, 2, 3], at=1.499) == [DelayOutcome.DELAY, 0.499]
    assert decide([1, 2, 3], at=1.5) == [DelayOutcome.WAIT_SUCCESS, 0.5]

    crew.wait_for_death(0)
    crew.restart(0)
    crew.meet()
    assert share(crew, EVERYONE)["reports"][0]["rank"] == 0, "the first is the clock again"


def test_a_rank_that_is_restarted_before_its_death_was_noticed_is_in_again_as_another(crew):
    crew.order([0], "doom", {"point": "before its line"})
    crew.begin(0, "share", **said(0))
    crew.wait_for_death(0)
    crew.restart(0)

    crew.meet()
    assert len(share(crew, EVERYONE)["reports"]) == RANKS


def test_a_living_rank_that_does_not_come_is_left_out_and_finds_its_way_back(crew):
    others = [0, 1, 3]
    crew.order(others, "wait_at_most", {"timeout_s": LEFT_OUT_AFTER_S})
    began_at = time.monotonic()
    answer = share(crew, others)
    crew.order(others, "wait_at_most", {"timeout_s": LIVING_S})
    assert [one["rank"] for one in answer["reports"]] == others
    assert time.monotonic() - began_at >= LEFT_OUT_AFTER_S

    late = crew.order([2], "share", said(2))[0]
    assert (late["round"], [one["rank"] for one in late["reports"]]) == (None, [2]), "it knows that it is out"
    crew.meet()
    assert len(share(crew, EVERYONE)["reports"]) == RANKS


def test_all_die_at_once_and_new_ones_begin_again():
    with crew_of("all-gather") as crew:
        crew.meet()
        before = share(crew, EVERYONE)["round"]
        crew.order(EVERYONE, "doom", {"point": "behind its line"})
        for rank in EVERYONE:
            crew.begin(rank, "share", **said(rank))
        for rank in EVERYONE:
            crew.wait_for_death(rank)
            crew.restart(rank)
        crew.meet()
        assert share(crew, EVERYONE)["round"] > before + 1


# ── any history of three ranks ────────────────────────────────────────────────────────────────────────────────────────

FEW = 3
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
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(FEW) as pool:
        AllGather.create(Path(name), FEW)
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
    @given(st.lists(st.lists(a_life, min_size=1, max_size=3), min_size=FEW, max_size=FEW))
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
