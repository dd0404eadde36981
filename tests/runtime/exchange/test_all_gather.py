"""Ranks that share collectives: who is in a round, and that all agree, whoever dies or comes."""

from __future__ import annotations

import time

import pytest

from rota.policy.prefill_delayer import DelayOutcome
from rota.runtime.replicas.exchange import all_gather
from tests.runtime.exchange.crew import RANKS, Crew, crew_of
from tests.runtime.exchange.doomed import POINTS
from tests.runtime.exchange.rank_process import LIVING_S

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
