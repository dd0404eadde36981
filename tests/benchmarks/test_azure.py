"""The Azure trace becomes the same requests every time, and the search finds the highest rate that holds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import azure
from rota.bench.questions import read_trace
from rota.core.ids import AdapterId

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One conversation a second for two minutes, over the end of an hour."""
    lines = [
        f"2023-11-16 {18 + (59 + n // 60) // 60}:{(59 + n // 60) % 60:02}:{n % 60:02}.6805900,{50 + n},20"
        for n in range(120)
    ]
    path = tmp_path / "azure.csv"
    path.write_text(HEAD + "\n".join(lines) + "\n")
    return path


def traffic(trace: Path, window_s: float = 30.0) -> azure.Traffic:
    return azure.Traffic(azure.read_azure(trace, 0, window_s), azure.draw_ranks(0), window_s, max_tokens=4096)


def test_a_window_has_the_first_requests_with_the_adapters_of_a_longer_one(trace):
    short, whole = (azure.read_azure(trace, 0, window_s) for window_s in (30.0, 3600.0))

    assert [one.at for one in short] == pytest.approx(list(range(30)))
    assert (len(whole), whole[:30]) == (120, short)
    assert azure.read_azure(trace, 1, 30.0) != short
    assert {one.prompt_tokens for one in short} == set(range(50, 80))


def test_most_adapters_are_small_and_every_seed_has_ranks_of_its_own():
    ranks = [rank for seed in range(50) for rank in azure.draw_ranks(seed)]

    assert azure.draw_ranks(0) == azure.draw_ranks(0) != azure.draw_ranks(1)
    assert ranks.count(8) / len(ranks) == pytest.approx(16 / 31, abs=0.03)
    assert ranks.count(128) / len(ranks) == pytest.approx(1 / 31, abs=0.01)


@pytest.mark.parametrize("limit", [0.3, 1.0, 2.7, 4.9])
def test_the_search_ends_close_below_the_highest_speed_that_holds(limit):
    found = azure.search(lambda speed: {"speed": speed, "holds": speed <= limit})
    best = azure.highest(found)

    assert best is not None
    assert limit / azure.CLOSE_ENOUGH <= best["speed"] <= limit
    assert [one["speed"] for one in found] == sorted(one["speed"] for one in found)


def test_where_no_rate_holds_none_is_the_highest():
    assert azure.highest(azure.search(lambda speed: {"speed": speed, "holds": False})) is None
    assert azure.row("wait", None)[:2] == ["wait", "none"]


@pytest.mark.parametrize("side", azure.SIDES)
def test_every_side_answers_every_request_as_long_as_the_trace_says(trace, side):
    found = azure.simulate(azure.SIDES[side], traffic(trace), speed=4.0)

    assert (found["requests"], found["failed"]) == (30, 0)
    assert found["rate_per_s"] == pytest.approx(4.0)
    assert found["output_tokens_per_s"] * 8.0 == pytest.approx(30 * 20, rel=0.2)


def test_adapters_need_more_pages_than_there_are_and_far_fewer_than_slots_of_the_largest_rank(trace):
    known = traffic(trace)
    pages = sum(known.pages_of(AdapterId(number)) for number in range(1, azure.ADAPTERS + 1))

    assert known.slots * 16 < pages < azure.ADAPTERS * 16 / 2


def test_what_was_found_makes_a_page_with_a_row_for_each_side(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["azure", str(trace), *f"--only wait --minutes 0.5 --output {tmp_path}".split()])
    azure.main()

    told, text = capsys.readouterr().out, (tmp_path / f"{azure.PAGE}.md").read_text()
    assert "wait: 1.00/s holds: TTFT P99" in told
    assert text.count("`wait`, pages") == 2
    assert (tmp_path / f"{azure.PAGE}.json").exists()


def test_the_window_is_a_trace_that_the_bench_reads(trace, tmp_path):
    file = tmp_path / "window.jsonl"
    azure.write_trace(file, traffic(trace), speed=2.0)
    lines = read_trace(file)

    assert [line.at for line in lines] == pytest.approx([n / 2.0 for n in range(30)])
    assert {line.prompt_tokens for line in lines} == set(range(50, 80))
    assert all(line.output_tokens == 20 and line.adapter for line in lines)


def test_a_server_for_the_trace_has_adapters_of_the_ranks_by_the_names_in_the_trace(tmp_path):
    azure.write_server(tmp_path / "served", "tiny", [8, 32], 8)
    options: dict[str, Any] = tomllib.loads((tmp_path / "served/serve.toml").read_text())

    assert [path.partition("=")[0] for path in options["lora_paths"]] == ["adapter1", "adapter2"]
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == [
        "model",
        "rank32-2",
        "rank8-1",
        "serve.toml",
    ]
