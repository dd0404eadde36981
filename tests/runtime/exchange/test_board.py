"""Independent replicas: a line each, and nobody ever waits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.policy.prefill_delayer import REPORT_LASTS_MS, RankReport, on_board
from rota.runtime.replicas.exchange.lines import MOST, SharedLines
from rota.runtime.replicas.exchange.place import WORDS, Board
from tests.runtime.exchange.crew import crew_of
from tests.waiting import TIMEOUT_S

WRITES = 100_000


@pytest.fixture
def path(tmp_path) -> Path:
    SharedLines.create(tmp_path / "board", 4, WORDS)
    return tmp_path / "board"


def at_work(now_ms: int = 5000, **said) -> RankReport:
    fields = {"is_prefillable": True, "is_below_watermark": False, "running": 3, "largest_batch": 4, "admissible": 2}
    return RankReport(**{**fields, **said}, now_ms=now_ms)


def ranks(reports: list[RankReport]) -> list[int]:
    return [report.rank for report in reports]


def test_a_rank_reads_what_the_others_have_said_last(path):
    first, second = Board(path, 0), Board(path, 1)
    second.share(at_work(running=7))
    second.share(at_work(running=9, held_ms=2**40))

    own, other = first.share(at_work(is_below_watermark=True))
    assert own == at_work(is_below_watermark=True)
    assert other == at_work(running=9, held_ms=MOST)._replace(rank=1)


def test_a_rank_that_makes_no_pass_is_out_after_a_second_and_in_again_with_its_next(path):
    """Whether it has died, is in a long step, or was started again."""
    first, second = Board(path, 0), Board(path, 1)
    first.share(at_work(5000))
    assert ranks(second.share(at_work(5000 + REPORT_LASTS_MS))) == [0, 1]
    assert ranks(second.share(at_work(5001 + REPORT_LASTS_MS))) == [1], "the clock has passed to the next"

    Board(path, 0).share(at_work(6100))
    assert ranks(second.share(at_work(6200))) == [0, 1]


def test_an_idle_rank_holds_nobody_back_from_its_last_pass_on(path):
    first, second = Board(path, 0), Board(path, 1)
    first.share(at_work())
    assert ranks(second.share(at_work())) == [0, 1]
    first.share(at_work(running=0, admissible=0, is_prefillable=False))
    assert ranks(second.share(at_work())) == [1]


def test_a_rank_whose_line_is_torn_has_said_what_it_said_before(path):
    first, second, lines = Board(path, 0), Board(path, 1), SharedLines(path, WORDS)
    first.share(at_work(running=7))
    whole = lines.memory[: lines.line_bytes]
    second.share(at_work())
    first.share(at_work(running=8))
    for torn in range(1, WORDS):  # so many words of the last write have arrived, in their order or not
        size = 8 * torn
        lines.memory[size : lines.line_bytes] = whole[size:]
        assert second.share(at_work())[0].running == 7
        first.share(at_work(running=8))
        lines.memory[:size] = whole[:size]
        assert second.share(at_work())[0].running == 7
        first.share(at_work(running=8))

    assert second.share(at_work())[0].running == 8
    assert ranks(Board(path, 2).share(at_work())) == [0, 1, 2]


def test_a_successor_of_a_rank_that_died_within_its_line_is_understood(path):
    first, second, lines = Board(path, 0), Board(path, 1), SharedLines(path, WORDS)
    for running in (7, 8):
        whole = lines.memory[: lines.line_bytes]
        first.share(at_work(running=running))
    lines.memory[8 : lines.line_bytes] = whole[8:]
    assert ranks(second.share(at_work())) == [1], "half a line says nothing"

    Board(path, 0).share(at_work(running=9))
    assert second.share(at_work())[0].running == 9


def test_a_line_that_another_process_writes_all_the_time_is_never_torn():
    with crew_of("board") as crew:
        reader, seen, ends_at = Board(crew.folder / "board", 0), {0}, time.monotonic() + TIMEOUT_S
        while len(seen) <= 100 and time.monotonic() < ends_at:  # on a busy machine the reader may hardly look meanwhile
            last = max(seen) + WRITES
            crew.begin(1, "hammer", first=max(seen) + 1, last=last)
            while max(seen) < last and time.monotonic() < ends_at:
                for report in reader.share(at_work(now_ms=0))[1:]:
                    number = report.running
                    assert report == RankReport(True, False, number, number, number, False, number, rank=1)
                    seen.add(number)
            crew.end(1)

    assert len(seen) > 100, "the reader has looked while the other wrote"


def test_the_time_of_a_line_is_right_also_where_its_lower_half_begins_anew(path):
    first, second = Board(path, 0), Board(path, 1)
    first.share(at_work(2**32 - 5))
    assert [report.now_ms for report in second.share(at_work(2**32 + 5))] == [2**32 - 5, 2**32 + 5]
    second.share(at_work(2**33 - 1))
    assert [report.now_ms for report in first.share(at_work(2**33 + 2))] == [2**33 + 2, 2**33 - 1]


numbers = st.integers(0, 9)
a_report = st.builds(
    RankReport,
    is_prefillable=st.booleans(),
    is_below_watermark=st.booleans(),
    running=numbers,
    largest_batch=numbers,
    admissible=numbers,
    is_blocked_by_adapters=st.booleans(),
    held_ms=st.integers(0, 9999),
    now_ms=st.integers(2**32 - 1500, 2**32 + 1500),
    rank=st.just(0),
    has_joined=st.just(False),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(others=st.lists(a_report, min_size=3, max_size=3), own=a_report)
def test_a_board_gives_what_the_policy_says(path, others, own):
    said = [(rank, report._replace(rank=rank)) for rank, report in zip((0, 1, 3), others, strict=True)]
    for rank, report in said:
        Board(path, rank).share(report)

    assert Board(path, 2).share(own) == on_board(own._replace(rank=2), [report for _, report in said])
