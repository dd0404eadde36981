from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core.ids import AdapterId
from rota.dashboard.frame import Spread
from rota.dashboard.window import BIN_S, EVERY_S, SPANS_S, Bin, ChartWindow, Span, bucket_of, spread_of


def histogram(*durations: float):
    window = ChartWindow()
    for duration in durations:
        window.open.ttft[bucket_of(duration)] += 1
    return window.open.ttft


def test_percentiles_lie_within_a_bucket_of_the_truth():
    spread = spread_of([histogram(*[0.1] * 60, *[0.4] * 38), histogram(*[3.0] * 2)])

    assert spread.p50 == pytest.approx(0.1, rel=0.03)
    assert spread.p99 == pytest.approx(3.0, rel=0.03)


def test_nothing_measured_has_no_percentiles():
    assert spread_of([]) == Spread(None, None)


def test_durations_beyond_all_measure_are_counted_at_the_edge():
    assert spread_of([histogram(0.0)]).p50 == pytest.approx(1e-5, rel=0.03)
    assert spread_of([histogram(1e9)]).p50 == pytest.approx(1e3, rel=0.03)


def test_a_closed_bin_becomes_a_point_of_the_charts():
    window = ChartWindow()
    window.open.tokens = 10
    window.open.gap[bucket_of(0.02)] += 10
    window.roll(BIN_S)

    charts = window.charts()
    assert [point.tokens_per_s for point in charts.points] == [10 / BIN_S]
    assert charts.points[0].gap.p50 == pytest.approx(0.02, rel=0.03)
    assert charts.ended_at == BIN_S


def test_every_span_forgets_what_is_older():
    window = ChartWindow()
    window.open.shares[AdapterId(1)].tokens = 600
    window.open.ttft[bucket_of(0.5)] += 1
    window.roll(10.0)
    minute, five, hour = (window.spans[seconds] for seconds in SPANS_S)
    assert minute.figures_of(AdapterId(1)).tokens_per_s == 60.0
    assert minute.spread("ttft").p50 is not None

    window.roll(70.0)
    assert minute.figures_of(AdapterId(1)).tokens_per_s == 0.0
    assert minute.spread("ttft").p50 is None
    assert five.figures_of(AdapterId(1)).tokens_per_s == pytest.approx(600 / 70)
    assert five.spread("ttft").p50 == pytest.approx(0.5, rel=0.05)

    window.roll(400.0)
    assert five.spread("ttft").p50 is None
    assert hour.figures_of(AdapterId(1)).tokens_per_s == pytest.approx(600 / 400)
    assert hour.spread("ttft").p50 == pytest.approx(0.5, rel=0.05)

    window.roll(3700.0)
    assert hour.total.tokens == 0


def test_charts_are_bounded_however_long_it_runs():
    window = ChartWindow()
    for second in range(5000):
        window.roll(float(second))

    points = [len(window.charts(seconds).points) for seconds in SPANS_S]
    assert points == [seconds / every_s for seconds, every_s in EVERY_S.items()] == [30, 150, 120]


def test_a_window_that_nobody_used_for_hours_starts_afresh():
    window = ChartWindow()
    window.open.tokens = 10
    window.roll(BIN_S)
    window.roll(1e6)

    assert [window.charts(seconds).points for seconds in SPANS_S] == [(), (), ()]
    assert window.rates(1e6) == (0.0, 0.0)


def test_rates_follow_the_last_seconds():
    window = ChartWindow()
    for second in range(10):
        window.roll(float(second))
        window.open.tokens += 100 if second >= 4 else 0

    assert window.rates(10.0)[0] == pytest.approx(100.0, rel=0.01)


@given(st.lists(st.dictionaries(st.sampled_from(["ann", "bob", 7]), st.integers(1, 5), max_size=3), max_size=12))
def test_a_span_is_the_sum_of_its_last_bins_and_remembers_nothing_older(story):
    span, kept = Span(6), deque(maxlen=3)
    for at, tokens in enumerate(story):
        closed = Bin(at * BIN_S, tokens=sum(tokens.values()))
        for sharer, count in tokens.items():
            closed.shares[sharer].tokens = count
            closed.shares[sharer].ttft[count] += 1
            closed.errors[str(count)] += 1
        kept.append(closed)
        span.add(closed)

    lasted_s = BIN_S * max(1, len(kept))
    assert span.tokens_per_s == sum(one.tokens for one in kept) / lasted_s
    assert span.total.errors == sum((one.errors for one in kept), Counter())
    assert {*span.total.shares} == {sharer for one in kept for sharer in one.shares}
    for sharer in span.total.shares:
        shares = [one.shares[sharer] for one in kept if sharer in one.shares]
        figures = span.figures_of(sharer)
        assert figures.tokens_per_s == sum(share.tokens for share in shares) / lasted_s
        assert figures.ttft == spread_of(share.ttft for share in shares)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40))
def test_a_point_of_the_hour_has_the_most_requests_that_were_open_at_one_moment(story):
    window = ChartWindow()
    for at, (waiting, admitted) in enumerate(story):
        window.roll(at * BIN_S)
        window.hold(waiting, admitted)
    window.roll(len(story) * BIN_S)

    bins = int(EVERY_S[3600] / BIN_S)
    whole = [story[begin : begin + bins] for begin in range(0, len(story) - bins + 1, bins)]
    # What was held at the end of a bin is still held at the beginning of the next.
    before = [story[begin - 1 : begin] for begin in range(0, len(story) - bins + 1, bins)]
    points = window.charts(3600).points
    assert [one.waiting for one in points] == [
        max(waiting for waiting, _ in [*early, *late]) for early, late in zip(before, whole, strict=True)
    ]


def test_errors_are_told_by_the_minute():
    window = ChartWindow()
    window.open.errors["bad_field"] = 3
    window.roll(BIN_S)

    assert window.charts().points[-1].errors_per_min == 90.0
