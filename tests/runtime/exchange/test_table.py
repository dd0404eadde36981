"""What the delayer promises, across four processes and with both exchanges."""

from __future__ import annotations

import pytest

from rota.policy.prefill_delayer import DelayOutcome
from tests.policy.delayer_table import ALL, NONE, SOME, TABLE
from tests.runtime.exchange.crew import RANKS, Crew, crew_of

EVERYONE = range(RANKS)
# Beside a batch of four these leave too few of ten rows, or enough.
FULL, FREE = 8, 1


@pytest.fixture(scope="module", params=["board", "all-gather"])
def crew(request):
    with crew_of(request.param) as crew:
        if crew.kind == "all-gather":
            crew.meet()
        yield crew


def new(crew: Crew, is_idle: bool = False, **fields) -> None:
    """Other delayers from now on; busy ones, unless told otherwise."""
    crew.order(EVERYONE, "new", {"batch": 4, **fields})
    if not is_idle:
        decide(crew, running=FREE, admissible=0)


def decide(crew: Crew, at: float = 1.0, **seen) -> list[str]:
    """The verdicts of all ranks on what each sees; a value that is a list has one entry for each rank.

    Under an all-gather the ranks' clocks differ by far. On a board each first writes what it will decide by.
    """
    fields = [
        {
            "running": FULL,
            "admissible": 1,
            "token_usage": 0.9,
            **{name: value[rank] if isinstance(value, list) else value for name, value in seen.items()},
            "now": at + (1000.0 * rank if crew.kind == "all-gather" else 0.0),
        }
        for rank in EVERYONE
    ]
    if crew.kind == "board":
        crew.order(EVERYONE, "share", *map(said, fields))
    crew.verdicts = crew.order(EVERYONE, "decide", *fields)
    return [verdict["reason"] for verdict in crew.verdicts]


def said(seen: dict) -> dict:
    """The report that a delayer with a watermark of 0.5 makes of what it sees."""
    return {
        "is_prefillable": seen["admissible"] > 0,
        "is_below_watermark": seen["token_usage"] < 0.5,
        "running": seen["running"],
        "largest_batch": 4,
        "admissible": seen["admissible"],
        "is_blocked_by_adapters": seen.get("blocked_by_adapters", False),
        "held_ms": int(seen.get("oldest_delay_s", 0.0) * 1000),
        "now_ms": int(seen["now"] * 1000),
    }


def of_those_with_prompts(crew: Crew, reasons: list[str], with_prompts: int) -> list[str]:
    """On a board a rank without prompts decides nothing."""
    if crew.kind == "all-gather":
        return reasons
    assert set(reasons[with_prompts:]) <= {DelayOutcome.NOTHING}
    return reasons[:with_prompts] or reasons


@pytest.mark.parametrize(("prefillable", "force", "slot", "before", "limit", "reason", "after"), TABLE)
def test_every_row_of_the_table(crew, prefillable, force, slot, before, limit, reason, after):
    new(crew, max_delay_passes=limit, token_usage_low_watermark=0.5)
    for _ in range(before):
        assert set(decide(crew)) == {DelayOutcome.DELAY}
    with_prompts = {ALL: RANKS, SOME: 2, NONE: 0}[prefillable]
    reasons = decide(
        crew,
        running=FULL if slot else FREE,
        admissible=[int(rank < with_prompts) for rank in EVERYONE],
        token_usage=[0.9, 0.4 if force else 0.9, 0.9, 0.9],
    )
    assert set(of_those_with_prompts(crew, reasons, with_prompts)) == {reason}

    decide(crew, running=FREE)  # enough rows are free: it ends every delay, and tells how long each was
    deciding = RANKS if crew.kind == "all-gather" else with_prompts or RANKS
    assert {verdict["passes"] for verdict in crew.verdicts[:deciding]} == {after}


def test_a_pass_in_which_only_adapters_block_keeps_the_delay(crew):
    new(crew, max_delay_passes=4)
    for _ in range(2):
        decide(crew)
    assert set(decide(crew, admissible=0, blocked_by_adapters=True)) == {DelayOutcome.NOTHING}

    assert set(decide(crew)) == {DelayOutcome.DELAY}
    assert set(decide(crew)) == {DelayOutcome.WAIT_TIMEOUT}


def test_the_first_prompts_after_every_idle_time_start_at_once(crew):
    new(crew, is_idle=True)
    for _ in range(2):
        assert set(decide(crew, running=0)) == {DelayOutcome.NO_WAIT}
        assert set(decide(crew)) == {DelayOutcome.DELAY}
        decide(crew, running=0, admissible=0)


def test_the_limit_by_passes(crew):
    new(crew, max_delay_passes=5)
    reasons = [decide(crew, at=1.0 + number) for number in range(5)]

    assert [set(one) for one in reasons] == [{DelayOutcome.DELAY}] * 4 + [{DelayOutcome.WAIT_TIMEOUT}]


def test_the_clock_cancels_the_queue_condition_and_never_the_slot_condition(crew):
    few = {"running": 40, "admissible": 1}  # of four that are wanted
    new(crew, max_running=200, queue_min_ratio=0.1, max_delay_ms=500)
    assert [set(decide(crew, at, **few)) for at in (1.0, 1.499, 1.5)] == [
        {DelayOutcome.DELAY},
        {DelayOutcome.DELAY},
        {DelayOutcome.WAIT_SUCCESS},
    ]

    new(crew, max_delay_ms=500)
    assert [set(decide(crew, at)) for at in (1.0, 1.5, 2.0)] == [{DelayOutcome.DELAY}] * 3


def test_no_request_of_any_rank_is_held_longer_in_all(crew):
    new(crew, max_delay_ms=500)
    assert set(decide(crew, oldest_delay_s=[0.0, 0.499, 0.0, 0.0])) == {DelayOutcome.DELAY}
    assert set(decide(crew, oldest_delay_s=[0.0, 0.0, 0.0, 0.5])) == {DelayOutcome.WAIT_TIMEOUT}


def test_the_watermark_of_a_rank_that_cannot_prefill_forces_nothing(crew):
    new(crew, token_usage_low_watermark=0.5)
    reasons = decide(crew, admissible=[1, 1, 1, 0], token_usage=[0.9, 0.9, 0.9, 0.1])
    assert set(of_those_with_prompts(crew, reasons, 3)) == {DelayOutcome.DELAY}
    reasons = decide(crew, admissible=[1, 1, 1, 0], token_usage=[0.9, 0.9, 0.1, 0.1])
    assert set(of_those_with_prompts(crew, reasons, 3)) == {DelayOutcome.TOKEN_WATERMARK}
