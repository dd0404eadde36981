from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.policy.prefill_delayer import (
    IDLE_PASS_S,
    REPORT_LASTS_MS,
    DelayOutcome,
    DelayVerdict,
    PrefillDelayer,
    RankReport,
    on_board,
)
from tests.policy.delayer_table import NONE, SOME, TABLE
from tests.waiting import TIMEOUT_S


class Others:
    """An exchange in which the other ranks say what a test tells them to."""

    def __init__(self, *reports: RankReport) -> None:
        self.reports = list(reports)

    def share(self, report: RankReport) -> list[RankReport]:
        return [report, *self.reports]


def rank(is_prefillable: bool = True, **said) -> RankReport:
    fields = {
        "is_below_watermark": False,
        "running": 0,
        "largest_batch": 0,
        "admissible": int(is_prefillable),
        "rank": 1,
    }
    return RankReport(is_prefillable=is_prefillable, **{**fields, **said})


def delayer(batch: int = 4, max_running: int = 10, is_idle: bool = False, **fields) -> PrefillDelayer:
    """Busy unless told otherwise; its largest recent batch was `batch`."""
    one = PrefillDelayer(max_running=max_running, **fields)
    if batch:
        one.note_batch(batch)
    if not is_idle:
        one.decide(running=1, admissible=0, token_usage=1.0, now=0.0)
    return one


def ask(one: PrefillDelayer, running: int = 8, admissible: int = 1, now: float = 1.0, **fields) -> DelayVerdict:
    """By default too few rows are free for a batch of four: the slot condition holds."""
    return one.decide(running, admissible, **{"token_usage": 0.9, "now": now, **fields})


def delayed(passes: int, started_at: float = 1.0, **fields) -> PrefillDelayer:
    """In the middle of a delay that began at `started_at`."""
    one = delayer(**fields)
    for _ in range(passes):
        assert ask(one, now=started_at).reason is DelayOutcome.DELAY
    return one


def passes_so_far(one: PrefillDelayer) -> int:
    """How long the delay has lasted, seen from outside: a free device ends it and tells."""
    return ask(one, running=0, now=2.0).passes


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("prefillable", "force", "slot", "before", "limit", "reason", "after"), TABLE)
def test_the_table_of_verdicts(prefillable, force, slot, before, limit, reason, after):
    one = delayed(before, max_delay_passes=limit, token_usage_low_watermark=0.5)
    if prefillable == SOME:
        one.exchange = Others(rank(is_prefillable=False))
    verdict = ask(
        one,
        running=8 if slot else 0,
        admissible=0 if prefillable == NONE else 1,
        token_usage=0.4 if force else 0.9,
    )

    assert verdict.reason is reason
    assert verdict.is_allowed == (reason is not DelayOutcome.DELAY)
    one.exchange = Others()
    assert passes_so_far(one) == after


def test_the_first_prompt_after_idle_is_not_held_back_and_the_second_is():
    one = delayer(is_idle=True)
    assert ask(one).reason is DelayOutcome.NO_WAIT
    assert ask(one).reason is DelayOutcome.DELAY


def test_the_very_first_prompts_have_waited_for_nothing():
    first = ask(delayer(batch=0, is_idle=True), running=0)
    assert (first.reason, first.passes, first.waited_s) == (DelayOutcome.NO_WAIT, 0, 0.0)


def test_a_delay_keeps_the_moment_it_began():
    one = delayed(2, started_at=1.0)
    assert ask(one, now=1.5).waited_s == 0.5
    assert ask(one, now=1.75) == DelayVerdict(
        is_allowed=False, reason=DelayOutcome.DELAY, passes=4, waited_s=0.75, ask_again_at=6.75
    )


def test_a_limit_of_one_pass_never_delays():
    assert ask(delayer(max_delay_passes=1)).reason is DelayOutcome.WAIT_TIMEOUT


# ── the conditions ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("running", "is_delayed"), [(6, False), (7, True)])
def test_prompts_wait_while_fewer_rows_are_free_than_the_largest_recent_batch(running, is_delayed):
    assert (not ask(delayer(batch=4, max_running=10), running=running).is_allowed) == is_delayed


def test_a_batch_counts_as_recent_for_sixteen_attempts():
    one = delayer(batch=4)
    for _ in range(15):
        one.note_batch(1)
    assert not ask(one).is_allowed
    one.note_batch(1)
    assert ask(one).is_allowed


@pytest.mark.parametrize(
    ("running", "queued", "batch", "most", "is_delayed"),
    [
        (40, 3, 64, None, True),  # 0.1 × 40 = 4 are wanted
        (40, 4, 64, None, False),
        (49, 4, 64, None, False),  # 4.9 is 4
        (40, 2, 3, None, True),  # never more than a batch
        (40, 3, 3, None, False),
        (40, 1, 64, 2, True),  # nor than a prefill may take, where that is set
        (40, 2, 64, 2, False),
        (9, 1, 64, None, False),  # 0.9 is 0: nothing to wait for
        (40, 1, 0, None, False),  # no batch was ever seen
    ],
)
def test_prompts_wait_until_a_share_of_the_running_is_queued(running, queued, batch, most, is_delayed):
    one = delayer(batch, max_running=200, queue_min_ratio=0.1, prefill_max_requests=most)
    assert (not ask(one, running, queued).is_allowed) == is_delayed


def test_without_a_ratio_the_queue_is_no_reason_to_wait():
    assert ask(delayer(max_running=200), running=100, admissible=1).reason is DelayOutcome.NO_WAIT


@pytest.mark.parametrize(("usage", "reason"), [(0.5, DelayOutcome.DELAY), (0.49, DelayOutcome.TOKEN_WATERMARK)])
def test_usage_must_be_strictly_below_the_watermark(usage, reason):
    assert ask(delayer(token_usage_low_watermark=0.5), token_usage=usage).reason is reason


def test_a_rank_with_nothing_to_prefill_does_not_force_by_its_empty_kv():
    one = delayer()
    one.exchange = Others(rank(is_prefillable=False, is_below_watermark=True))
    assert ask(one).reason is DelayOutcome.DELAY


def test_the_clock_cancels_the_queue_condition():
    one = delayer(max_running=200, queue_min_ratio=0.1, max_delay_ms=500)
    assert ask(one, running=40, now=1.0).reason is DelayOutcome.DELAY
    assert ask(one, running=40, now=1.499).reason is DelayOutcome.DELAY
    assert ask(one, running=40, now=1.5).reason is DelayOutcome.WAIT_SUCCESS


def test_the_clock_never_cancels_the_slot_condition():
    one = delayed(1, started_at=1.0, max_delay_ms=500)
    assert ask(one, now=60.0).reason is DelayOutcome.DELAY


# ── better than there ────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_that_wait_for_an_absent_adapter_do_not_fill_the_queue():
    """Two hundred wait, but of them one could run now: that is what counts."""
    one = delayer(batch=8, max_running=200, queue_min_ratio=0.1)
    assert ask(one, running=80, admissible=1).reason is DelayOutcome.DELAY


def test_a_pass_blocked_by_adapters_does_not_restart_the_wait():
    one = delayed(2, max_delay_passes=4)
    assert ask(one, admissible=0, blocked_by_adapters=True).reason is DelayOutcome.NOTHING
    assert ask(one).reason is DelayOutcome.DELAY
    assert ask(one).reason is DelayOutcome.WAIT_TIMEOUT


def test_no_request_is_held_longer_in_all_whatever_the_passes_do():
    one = delayer(max_delay_ms=500)
    assert ask(one, oldest_delay_s=0.499).reason is DelayOutcome.DELAY
    assert ask(one, oldest_delay_s=0.5).reason is DelayOutcome.WAIT_TIMEOUT


def test_a_delay_asks_to_be_called_before_anyone_is_held_too_long():
    assert ask(delayer(max_delay_ms=500), now=7.0, oldest_delay_s=0.4).ask_again_at == pytest.approx(7.1)


def test_a_delay_is_asked_about_again_at_once_while_no_rank_runs_anything_to_make_a_pass_for():
    one = delayer(max_delay_ms=500)
    one.exchange = Others(rank(is_prefillable=False))
    assert ask(one, running=0, now=7.0).ask_again_at == 7.0 + IDLE_PASS_S
    one.exchange = Others(rank(is_prefillable=False, running=1))
    assert ask(one, running=0, now=7.0).ask_again_at == 7.5


def test_the_time_is_taken_from_the_first_ranks_clock():
    ahead = delayer(max_running=200, queue_min_ratio=0.1, max_delay_ms=500)
    reports = [
        rank(running=40, largest_batch=4, now_ms=1000, rank=0),
        rank(running=40, largest_batch=4, now_ms=900_000),
    ]

    class Second:
        def share(self, report: RankReport) -> list[RankReport]:
            return reports

    ahead.exchange = Second()
    assert ask(ahead, running=40, now=900.0).reason is DelayOutcome.DELAY
    reports[0] = rank(running=40, largest_batch=4, now_ms=1499, rank=0)
    assert ask(ahead, running=40, now=950.0).reason is DelayOutcome.DELAY, (
        "its own clock has gone far, the first has not"
    )
    reports[0] = rank(running=40, largest_batch=4, now_ms=1500, rank=0)
    assert ask(ahead, running=40, now=950.1).reason is DelayOutcome.WAIT_SUCCESS


class RoundTable:
    """Where every rank waits for every other."""

    def __init__(self, ranks: int) -> None:
        self.reports: list[RankReport | None] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=TIMEOUT_S)


class Chair:
    """One rank's exchange."""

    def __init__(self, table: RoundTable, number: int) -> None:
        self.table, self.number = table, number

    def share(self, report: RankReport) -> list[RankReport]:
        self.table.reports[self.number] = report._replace(rank=self.number)
        self.table.barrier.wait()
        reports = list(self.table.reports)
        self.table.barrier.wait()
        return reports


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(
            st.fixed_dictionaries(
                {
                    "running": st.sampled_from([0, 5, 9]),
                    "admissible": st.integers(0, 3),
                    "token_usage": st.sampled_from([0.1, 0.9]),
                    "now": st.floats(0.0, 20.0),
                    "blocked_by_adapters": st.booleans(),
                    "oldest_delay_s": st.sampled_from([0.0, 0.3, 0.6]),
                }
            ),
            min_size=3,
            max_size=3,
        ),
        max_size=12,
    )
)
def test_ranks_never_disagree_whatever_each_of_them_sees(passes):
    """Though their clocks differ and each knows only its own queue, adapters and delays."""
    table = RoundTable(3)
    ranks = [
        delayer(is_idle=True, max_delay_passes=4, max_delay_ms=500, queue_min_ratio=0.3, token_usage_low_watermark=0.05)
        for _ in range(3)
    ]
    for number, one in enumerate(ranks):
        one.exchange = Chair(table, number)
    with ThreadPoolExecutor(3) as pool:
        for seen in passes:
            verdicts = list(pool.map(lambda pair: pair[0].decide(**pair[1]), zip(ranks, seen, strict=True)))
            assert len({(one.is_allowed, one.reason, one.passes, one.waited_s) for one in verdicts}) == 1


def test_a_prompt_after_every_idle_time_starts_at_once_and_not_only_after_the_first():
    one = delayer(is_idle=True)
    assert ask(one).reason is DelayOutcome.NO_WAIT
    assert ask(one).reason is DelayOutcome.DELAY, "it is busy"

    ask(one, running=0, admissible=0)
    assert ask(one).reason is DelayOutcome.NO_WAIT
    assert ask(one).reason is DelayOutcome.DELAY


# ── ranks that come and go ───────────────────────────────────────────────────────────────────────────────────────────


class Told:
    """An exchange that gives what a test tells it to, whatever is said."""

    def __init__(self, *reports: RankReport) -> None:
        self.reports = list(reports)

    def share(self, report: RankReport) -> list[RankReport]:
        return self.reports


def waiting(number: int, now_ms: int, **said) -> RankReport:
    """Forty run and one waits: with a ratio of 0.1, prompts are held back until the clock has gone far enough."""
    return rank(running=40, largest_batch=4, rank=number, now_ms=now_ms, **said)


def test_the_time_waited_does_not_jump_when_the_clock_changes_hands():
    one = delayer(max_running=200, queue_min_ratio=0.1, max_delay_ms=500)
    passes = [
        [waiting(0, 1000), waiting(1, 900_000), waiting(2, 5)],
        [waiting(0, 1200), waiting(1, 900_100), waiting(2, 205)],
        [waiting(1, 900_300), waiting(2, 405)],  # the first has died, and the second counts on: 0.2 s
        [waiting(0, 7), waiting(1, 900_350), waiting(2, 500)],  # the first is back, with another clock: 0.05 s
        [waiting(0, 17), waiting(1, 990_000), waiting(2, 900)],
        [waiting(3, 1), waiting(4, 1)],  # nobody is left of the last pass: no time is counted
    ]
    waited = []
    for reports in passes:
        one.exchange = Told(*reports)
        waited.append(ask(one).waited_s)

    assert waited == [0.0, 0.2, 0.4, 0.45, 0.46, 0.46]


def test_a_clock_that_goes_back_takes_no_time_away():
    one = delayer(max_running=200, queue_min_ratio=0.1)
    for now_ms, waited_s in [(1000, 0.0), (1300, 0.3), (900, 0.3), (1000, 0.4)]:
        one.exchange = Told(waiting(0, now_ms))
        assert ask(one).waited_s == waited_s


def test_all_begin_anew_when_a_rank_joins_as_nobody_can_tell_it_how_things_stood():
    old, new = delayed(2), delayer(is_idle=True)
    reports = Told(waiting(0, 1), rank(rank=1, running=8, largest_batch=4, has_joined=True))
    old.exchange = new.exchange = reports
    old.max_running = new.max_running = 41

    first = ask(old)
    assert first == ask(new)
    assert (first.reason, first.passes, first.waited_s) == (DelayOutcome.NO_WAIT, 0, 0.0)


def test_on_a_board_a_rank_goes_by_those_that_are_at_work():
    own = rank(rank=2, running=3, now_ms=5000)
    fresh, old = rank(rank=0, running=1, now_ms=5000 - REPORT_LASTS_MS), rank(rank=1, running=1, now_ms=3999)
    idle, blocked = rank(False, rank=3, now_ms=5000), rank(False, rank=4, now_ms=5000, is_blocked_by_adapters=True)
    starting = rank(rank=5, now_ms=5001)

    assert on_board(own, [starting, fresh, old, idle, blocked]) == [fresh, own, blocked, starting]


def test_on_a_board_a_rank_that_runs_nothing_waits_for_nobody():
    own = rank(rank=1)
    assert on_board(own, [rank(False, rank=0, running=9)]) == [own]
