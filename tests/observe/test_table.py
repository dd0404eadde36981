from __future__ import annotations

import pytest

from rota.core.events import Finished, FinishReason, Produced
from rota.core.ids import AdapterId, RequestId
from rota.observe.summary import Recorder
from rota.observe.table import print_figures, print_table, seconds


def summary(reason: FinishReason = FinishReason.LENGTH) -> dict[str, object]:
    recorder = Recorder()
    recorder.asked(RequestId("r"), AdapterId(3), 0.0)
    recorder.observe([Produced(0.25, (RequestId("r"),), (1,)), Produced(1.5, (RequestId("r"),), (1,))])
    recorder.observe([Finished(RequestId("r"), 1.5, reason)])
    return recorder.summary()


def test_a_policy_is_one_line_with_its_times(capsys):
    print_table({"rotate": summary(), "wait": summary()})
    shown = capsys.readouterr().out

    line = next(line for line in shown.splitlines() if "rotate" in line)
    assert "250 ms" in line and "1.50 s" in line and "1.25 s" in line
    assert "…" not in shown and "failed" not in shown


def test_adapters_are_shown_on_request_and_failures_when_there_are_some(capsys):
    print_table({"rotate": summary(FinishReason.FAILED)}, is_per_adapter=True)
    shown = capsys.readouterr().out

    assert "failed" in shown
    assert any(line.split()[:1] == ["3"] for line in shown.splitlines())


def test_every_kind_of_time_is_a_line_with_all_its_figures(capsys):
    print_figures(summary())
    shown = capsys.readouterr().out

    assert "median" in shown and "P95" in shown
    line = next(line for line in shown.splitlines() if "time to first token" in line)
    assert line.count("250 ms") == 6


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0012, "1.2 ms"),
        (0.083, "83 ms"),
        (0.9996, "1.00 s"),
        (7.91, "7.91 s"),
        (39.55, "39.5 s"),
        (3600.0, "3,600 s"),
    ],
)
def test_a_duration_has_as_many_digits_as_matter(value, shown):
    assert seconds(value) == shown
