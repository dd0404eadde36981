"""What a run's recorder saw, as records, a summary and a table."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rota.core.errors import Fault, FaultCode
from rota.core.events import Event, Finished, FinishReason, Produced
from rota.core.ids import BASE, AdapterId, RequestId
from rota.observe import summary
from rota.observe.summary import Recorder, TokenTimes, jain, mean_of, spread
from rota.observe.table import print_table, seconds

# ── summaries ─────────────────────────────────────────────────────────────────────────────────────────────────────────

FIGURES = {"mean", "median", "p90", "p95", "p99", "max"}


def follow(recorder: Recorder, id: str, asked_at: float, token_times: list[float], adapter: AdapterId = BASE) -> None:
    """A request from its asking to its last token."""
    request_id = RequestId(id)
    recorder.asked(request_id, adapter, asked_at)
    for at in token_times:
        recorder.observe([Produced(at=at, request_ids=(request_id,), tokens=(7,))])
    recorder.observe([Finished(request_id=request_id, at=token_times[-1], reason=FinishReason.LENGTH)])


def test_a_summary_tells_what_the_clients_felt():
    recorder = Recorder()
    follow(recorder, "r", 1.0, [1.5, 1.6, 1.9])
    summary = recorder.summary()

    assert summary["ttft_s"]["mean"] == pytest.approx(0.5)
    assert summary["e2e_s"]["mean"] == pytest.approx(0.9)
    assert summary["tpot_s"]["mean"] == pytest.approx(0.2)
    assert summary["itl_s"]["median"] == pytest.approx(0.1)
    assert summary["gap_s"]["max"] == pytest.approx(0.3)
    assert summary["output_tokens_per_s"] == pytest.approx(3 / 0.9)


def test_gap_is_the_worst_of_each_request_and_itl_is_every_time_between_two_tokens():
    recorder = Recorder()
    follow(recorder, "smooth", 0.0, [1.0, 1.1, 1.2, 1.3])
    follow(recorder, "stalled", 0.0, [1.0, 5.0])
    summary = recorder.summary()

    assert summary["itl_s"]["median"] == pytest.approx(0.1)
    assert summary["gap_s"]["mean"] == pytest.approx((0.1 + 4.0) / 2)


@pytest.mark.parametrize(
    ("moments", "stall_s"),
    [
        ([1.0, 1.05, 1.1], 0.0),
        ([1.0, 1.01, 1.02, 1.15], 0.0),  # three tokens are text for 0.15 s
        ([1.0, 1.01, 1.02, 1.65, 1.7], 0.5),
        ([1.0, 1.3, 1.9], 0.55),  # the longest, and not their sum
    ],
)
def test_a_reader_stands_still_from_the_last_word_read_until_the_next_token(moments, stall_s):
    at_once, step_by_step = Recorder(), Recorder()
    follow(at_once, "r", 0.0, moments)
    step_by_step.asked("r", AdapterId(0), 0.0)
    for at in moments:
        step_by_step.observe([Produced(at=at, request_ids=("r",), tokens=(7,))])
        step_by_step.settle()
    step_by_step.observe([Finished(request_id="r", at=moments[-1], reason=FinishReason.LENGTH)])

    for recorder in (at_once, step_by_step):
        assert recorder.summary()["stall_s"]["max"] == pytest.approx(stall_s)


def test_nobody_reads_at_a_pace_of_zero():
    recorder = Recorder(reader_pace=0.0)
    follow(recorder, "r", 0.0, [1.0, 9.0])
    assert recorder.summary()["stall_s"]["max"] == 0.0


def test_every_adapter_has_the_same_figures_under_its_name():
    recorder = Recorder()
    follow(recorder, "a", 0.0, [1.0, 1.1])
    follow(recorder, "b", 0.0, [3.0, 3.4], adapter=AdapterId(2))
    summary = recorder.summary(lambda adapter: f"adapter{adapter}" if adapter else "base")

    assert list(summary["adapters"]) == ["base", "adapter2"]
    assert summary["adapters"]["adapter2"]["itl_s"]["max"] == pytest.approx(0.4)
    for figures in (summary, *summary["adapters"].values()):
        for name in ("ttft_s", "e2e_s", "tpot_s", "itl_s", "gap_s", "stall_s"):
            assert figures[name].keys() == FIGURES


def test_adapters_are_in_the_order_of_their_numbers_behind_the_base_model():
    recorder = Recorder()
    for adapter in (12, 2, 1, 0):
        recorder.asked(RequestId(f"r{adapter}"), AdapterId(adapter), 0.0)
    names = {0: "model", 1: "b10", 2: "b9", 12: "a"}

    assert list(recorder.summary(lambda adapter: names[adapter])["adapters"]) == ["model", "a", "b9", "b10"]


def test_a_request_that_failed_counts_as_failed_and_not_in_the_times():
    recorder = Recorder()
    follow(recorder, "served", 0.0, [1.0, 1.1])
    recorder.asked(RequestId("refused"), BASE, 0.0)
    recorder.observe([Finished(request_id=RequestId("refused"), at=0.0, reason=FinishReason.FAILED)])
    summary = recorder.summary()

    assert (summary["requests"], summary["failed"]) == (2, 1)
    assert summary["ttft_s"]["mean"] == pytest.approx(1.0)


def test_a_client_who_left_is_counted_and_is_no_failure():
    recorder = Recorder()
    follow(recorder, "served", 0.0, [1.0, 1.1])
    recorder.asked(RequestId("gone"), BASE, 0.0)
    recorder.observe([Finished(request_id=RequestId("gone"), at=0.5, reason=FinishReason.ABORT)])
    summary = recorder.summary()

    assert (summary["requests"], summary["failed"], summary["left"]) == (2, 0, 1)


def test_tokens_that_came_together_count_as_many_as_the_ending_says():
    recorder = Recorder()
    recorder.asked(RequestId("r"), BASE, 0.0)
    recorder.observe(
        [
            Produced(at=1.0, request_ids=(RequestId("r"),), tokens=(7,)),
            Produced(at=2.0, request_ids=(RequestId("r"),), tokens=(7,)),
        ]
    )
    recorder.observe(
        [Finished(request_id=RequestId("r"), at=2.0, reason=FinishReason.STOP, prompt_tokens=12, output_tokens=5)]
    )
    summary = recorder.summary()

    assert (summary["input_tokens"], summary["output_tokens"]) == (12, 5)
    assert summary["tpot_s"]["mean"] == pytest.approx(1.0 / 4)
    assert summary["itl_s"]["mean"] == pytest.approx(1.0)
    assert summary["requests_per_s"] == pytest.approx(0.5)


def test_percentiles_are_values_that_occurred():
    figures = spread([float(value) for value in range(1, 101)])

    assert (figures["median"], figures["p90"], figures["p99"], figures["max"]) == (50.0, 90.0, 99.0, 100.0)
    assert spread([])["p99"] == 0.0


def test_the_mean_over_seeds_is_taken_number_by_number():
    first = {"requests": 2, "ttft_s": {"p99": 1.0}, "adapters": {"a": {"requests": 2}}}
    second = {"requests": 2, "ttft_s": {"p99": 3.0}, "adapters": {"b": {"requests": 2}}}

    assert mean_of([first, second]) == {
        "requests": 2.0,
        "ttft_s": {"p99": 2.0},
        "adapters": {"a": {"requests": 2.0}, "b": {"requests": 2.0}},
    }


def test_fairness_is_one_when_all_are_alike_and_one_in_n_when_one_has_everything():
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)


def test_fairness_is_among_adapters_and_asks_neither_the_base_model_nor_guests():
    recorder = Recorder(transients={AdapterId(3)})
    follow(recorder, "base", 0.0, [9.0])
    follow(recorder, "one", 0.0, [2.0], AdapterId(1))
    follow(recorder, "two", 0.0, [2.0], AdapterId(2))
    follow(recorder, "transient", 0.0, [7.0], AdapterId(3))

    assert recorder.summary()["fairness"] == pytest.approx(1.0)

    follow(recorder, "four", 0.0, [4.0], AdapterId(4))
    assert recorder.summary()["fairness"] == pytest.approx(jain([2.0, 2.0, 4.0]))


@pytest.mark.parametrize("reason", [FinishReason.FAILED, FinishReason.ABORT])
def test_an_adapter_that_answered_nobody_has_no_first_token_and_no_say_in_fairness(reason):
    recorder = Recorder()
    follow(recorder, "one", 0.0, [1.0], AdapterId(1))
    follow(recorder, "two", 0.0, [3.0], AdapterId(2))
    recorder.asked(RequestId("lost"), AdapterId(3), 0.0)
    recorder.observe([Finished(request_id=RequestId("lost"), at=0.5, reason=reason)])
    summary = recorder.summary()

    assert summary["fairness"] == pytest.approx(jain([1.0, 3.0]))
    assert summary["adapters"]["3"]["failed"] + summary["adapters"]["3"]["left"] == 1


def test_without_adapters_nobody_is_treated_unfairly():
    recorder = Recorder()
    follow(recorder, "base", 0.0, [1.0])

    assert recorder.summary()["fairness"] == 1.0


@pytest.mark.parametrize("reason", [FinishReason.FAILED, FinishReason.ABORT])
def test_the_gaps_of_an_answer_that_was_not_completed_count_nowhere(reason):
    recorder = Recorder()
    follow(recorder, "answered", 0.0, [1.0, 1.1, 1.2])
    recorder.asked(RequestId("half"), BASE, 0.0)
    recorder.observe([Produced(at=at, request_ids=(RequestId("half"),), tokens=(7,)) for at in (1.0, 8.0)])
    recorder.observe([Finished(request_id=RequestId("half"), at=9.0, reason=reason)])
    summary = recorder.summary()

    for figures in (summary, summary["adapters"]["0"]):
        for name in ("itl_s", "tpot_s", "gap_s"):
            assert figures[name]["max"] == pytest.approx(0.1), name


def failing(*codes: FaultCode) -> Recorder:
    """A run in which one request was answered and others failed."""
    recorder = Recorder()
    follow(recorder, "fine", 0.0, [1.0])
    for number, code in enumerate(codes):
        request_id = RequestId(f"r{number}")
        recorder.asked(request_id, AdapterId(2), 0.0)
        fault = Fault(code, "No.")
        recorder.observe([Finished(request_id=request_id, at=1.0, reason=FinishReason.FAILED, fault=fault)])
    return recorder


def test_failed_requests_are_counted_by_reason_in_all_and_for_each_adapter():
    summary = failing(FaultCode.QUEUE_FULL, FaultCode.PROMPT_TOO_LONG, FaultCode.QUEUE_FULL).summary()

    assert (
        summary["failures"] == summary["adapters"]["2"]["failures"] == {"context_length_exceeded": 1, "queue_full": 2}
    )
    assert summary["adapters"]["0"]["failures"] == {}


def test_a_run_without_a_kind_of_failure_counts_as_zero_in_the_mean():
    runs = [
        failing(FaultCode.QUEUE_FULL, FaultCode.QUEUE_FULL),
        failing(),
        failing(FaultCode.PROMPT_TOO_LONG),
        failing(),
    ]

    assert mean_of([run.summary() for run in runs])["failures"] == {"context_length_exceeded": 0.25, "queue_full": 0.5}


# ── tokens that are noted many at once ────────────────────────────────────────────────────────────────────────────────


def traffic(seed: int) -> list[Event]:
    """Steps with some of the open requests each; a few requests end in between."""
    dice = random.Random(seed)
    open_ids = [RequestId(f"r{number}") for number in range(20)]
    at = 1.0
    events: list[Event] = [Produced(at=at, request_ids=tuple(open_ids), tokens=(0,) * len(open_ids))]
    while open_ids:
        at += dice.uniform(0.001, 0.1)
        chosen = tuple(one for one in open_ids if dice.random() < 0.7)
        events.append(Produced(at=at, request_ids=chosen, tokens=(0,) * len(chosen)))
        if dice.random() < 0.3:
            gone = open_ids.pop(dice.randrange(len(open_ids)))
            reason = dice.choice([FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ABORT])
            events.append(Finished(request_id=gone, at=at, reason=reason))
    return events


def new_recorder() -> Recorder:
    recorder = Recorder()
    for number in range(20):
        recorder.asked(RequestId(f"r{number}"), AdapterId(number % 3), number / 100)
    return recorder


def one_by_one(events: list[Event]) -> Recorder:
    recorder = new_recorder()
    for event in events:
        if isinstance(event, Produced):
            for request_id in event.request_ids:
                recorder.records[request_id].note_tokens(np.array([event.at]))
        else:
            recorder.observe([event])
    return recorder


@pytest.mark.parametrize("most", [1, 40, 1 << 18])
@pytest.mark.parametrize("seed", range(5))
def test_many_at_once_or_one_by_one_gives_the_same_records_and_summary(seed, most, monkeypatch):
    monkeypatch.setattr(summary, "MOST_TOKENS", most)
    events = traffic(seed)
    together, apart = new_recorder(), one_by_one(events)
    for event in events:
        together.observe([event])

    assert together.summary() == apart.summary()
    assert together.records == apart.records


def test_more_requests_than_a_short_number_can_count_are_told_apart():
    times = TokenTimes()
    ids = tuple(RequestId(f"r{number}") for number in range(70_000))
    for at in (1.0, 2.0):
        times.note(Produced(at=at, request_ids=ids, tokens=(0,) * len(ids)))
    found = {request_id: moments.tolist() for request_id, moments in times.take()}

    assert found == {request_id: [1.0, 2.0] for request_id in ids}
    assert not len(times)
    assert not list(times.take())


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS = ("(TTFT)", "(E2E)", "(TPOT)", "(ITL)", "worst pause of an answer")


def printed(reason: FinishReason = FinishReason.LENGTH) -> dict[str, object]:
    """Three tokens of an adapter: 250 ms to the first, then 1.00 s and 250 ms between them."""
    recorder = Recorder()
    recorder.asked(RequestId("r"), AdapterId(3), 0.0)
    recorder.observe([Produced(at=at, request_ids=(RequestId("r"),), tokens=(1,)) for at in (0.25, 1.25, 1.5)])
    recorder.observe([Finished(request_id=RequestId("r"), at=1.5, reason=reason, prompt_tokens=6)])
    return recorder.summary(lambda adapter: f"adapter{adapter}")


def shown(capsys, *names: str, reason: FinishReason = FinishReason.LENGTH, is_per_adapter: bool = False) -> list[str]:
    """The lines that are printed for summaries of these names."""
    print_table({name: printed(reason) for name in names}, is_per_adapter)
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
    failed = {**printed(FinishReason.FAILED), "failures": {"queue_full": 1}}
    print_table({"wait": failed, "rotate": printed()})
    lines = capsys.readouterr().out.splitlines()

    assert "failed: queue_full" in next(line for line in lines if "requests/s" in line)
    assert [words(next(line for line in lines if name in line))[-1] for name in ("wait", "rotate")] == ["1", "0"]
    assert not any("failed:" in line for line in shown(capsys, "rotate"))
