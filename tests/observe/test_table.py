from __future__ import annotations

import pytest

from rota.core.events import Finished, FinishReason, Produced
from rota.core.ids import AdapterId, RequestId
from rota.observe.summary import Recorder
from rota.observe.table import print_table, seconds

KINDS = ("(TTFT)", "(E2E)", "(TPOT)", "(ITL)", "worst pause of an answer")


def summary(reason: FinishReason = FinishReason.LENGTH) -> dict[str, object]:
    """Three tokens of an adapter: 250 ms to the first, then 1.00 s and 250 ms between them."""
    recorder = Recorder()
    recorder.asked(RequestId("r"), AdapterId(3), 0.0)
    recorder.observe([Produced(at=at, request_ids=(RequestId("r"),), tokens=(1,)) for at in (0.25, 1.25, 1.5)])
    recorder.observe([Finished(request_id=RequestId("r"), at=1.5, reason=reason, prompt_tokens=6)])
    return recorder.summary(lambda adapter: f"adapter{adapter}")


def shown(capsys, *names: str, reason: FinishReason = FinishReason.LENGTH, is_per_adapter: bool = False) -> list[str]:
    """The lines that are printed for summaries of these names."""
    print_table({name: summary(reason) for name in names}, is_per_adapter)
    return capsys.readouterr().out.splitlines()


def words(line: str) -> list[str]:
    return line.split()


def test_a_line_says_how_many_came_and_how_fast_they_were_served(capsys):
    lines = shown(capsys, "rotate", "wait")

    heads = next(line for line in lines if "requests/s" in line)
    assert heads.split("  ")[-1].strip() == "fairness"
    assert words(next(line for line in lines if "rotate" in line)) == [
        "rotate", "1", "0", "0", "1.5", "s", "0.67", "4", "2", "1.000",
    ]  # fmt: skip
    assert not any("…" in line for line in lines)


def test_every_kind_of_time_is_a_block_with_a_line_for_each(capsys):
    lines = shown(capsys, "rotate", "wait")

    assert words(next(line for line in lines if "P95" in line)) == ["mean", "median", "P90", "P95", "P99", "max"]
    for kind in KINDS:
        index, line = next((index, line) for index, line in enumerate(lines) if kind in line)
        assert "rotate" in line
        assert words(lines[index + 1])[0] == "wait"
    between = next(line for line in lines if "(ITL)" in line)
    assert words(between)[-12:] == ["625", "ms", "250", "ms", "1.00", "s", "1.00", "s", "1.00", "s", "1.00", "s"]


def test_adapters_are_shown_on_request_with_the_same_figures(capsys):
    assert not any("adapter3" in line for line in shown(capsys, "rotate"))
    lines = shown(capsys, "rotate", is_per_adapter=True)

    of_adapter = [line for line in lines if "adapter3" in line]
    assert words(of_adapter[0])[:4] == ["adapter3", "1", "0", "0"]
    assert [kind for kind in KINDS if any(kind in line for line in of_adapter)] == list(KINDS)


def test_where_nothing_was_answered_there_are_no_times(capsys):
    lines = shown(capsys, "rotate", reason=FinishReason.FAILED)

    assert words(next(line for line in lines if "rotate" in line))[:4] == ["rotate", "1", "1", "0"]
    assert words(next(line for line in lines if "(TTFT)" in line))[-6:] == ["–"] * 6


def test_a_name_is_shown_as_it_is(capsys):
    assert any("[red]hot :fire:" in line for line in shown(capsys, "[red]hot :fire:"))


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


def test_a_table_says_why_requests_failed_and_has_no_such_column_if_none_did(capsys):
    failed = {**summary(FinishReason.FAILED), "failures": {"queue_full": 1}}
    print_table({"wait": failed, "rotate": summary()})
    lines = capsys.readouterr().out.splitlines()

    assert "failed: queue_full" in next(line for line in lines if "requests/s" in line)
    assert [words(next(line for line in lines if name in line))[-1] for name in ("wait", "rotate")] == ["1", "0"]
    assert not any("failed:" in line for line in shown(capsys, "rotate"))
