"""The benchmark of updates on a CPU, with a tiny model: every part of it runs, and says what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.h200.gaps import GapWatch, gaps_apart, gaps_of
from benchmarks.h200.update_calls import WEIGHTS, in_memory
from benchmarks.h200.update_steps import compared
from benchmarks.h200.updates import main


def measure(assets: Path, out: Path, part: str, *flags: str) -> dict:
    quick = ["--rounds", "3", "--seconds", "1", "--decodes", "4", "--tokens", "60", "--weights", "disk"]
    asked = ["--shape", "tiny", "--folder", str(assets), "--out", str(out / "updates.json"), "--only", part]
    assert main([*asked, *quick, *flags]) == 0
    return json.loads((out / "updates.json").read_text())[part]


@pytest.mark.long("starts a server")
def test_calls_are_timed_from_folders_and_bodies_and_the_decodes_are_watched(assets, tmp_path):
    found = measure(assets, tmp_path, "call")

    assert 0 < found["folder_ms"]["median"] <= found["folder_ms"]["max"]
    assert found["body_ms"]["median"] > 0
    assert found["gap_ms"]["median"] > 0
    # A tiny model may give no token while a call lasts; then there is nothing to tell.
    assert {"gap_ms_apart", "gap_ms_beside_folders", "gap_ms_beside_bodies"} <= set(found)


@pytest.mark.long("starts a server")
def test_a_rate_of_updates_is_kept_beside_decodes_and_leaves_one_version(assets, tmp_path):
    found = measure(assets, tmp_path, "rate", "--per-second", "5")

    assert (found["updates"], found["versions_left"]) == (5, 1)
    assert found["tokens_per_s"] > 0
    assert found["memory_mb_after"]["VmRSS"] > 0


@pytest.mark.long("starts a server")
def test_cold_adapters_are_read_for_their_first_token(assets, tmp_path):
    assert measure(assets, tmp_path, "cold")["cold_ms"]["median"] > 0


def test_new_versions_have_the_precision_that_is_asked_for(assets):
    with in_memory(assets / "adapter7", "float32") as place:
        dtypes = {each.dtype for number in "01" for each in load_file(place / number / WEIGHTS).values()}
    assert dtypes == {torch.float32}


@pytest.mark.long("starts a server, and has up to three updates within a second while decodes go on")
def test_steps_beside_updates_are_told_apart_from_others(assets, tmp_path):
    found = measure(assets, tmp_path, "steps")

    assert 0 < found["updates"] <= 3
    assert found["steps_beside"] > 0


def test_features_are_compared_with_plain_adapters(assets, tmp_path):
    found = measure(assets, tmp_path, "features")

    assert found["LoRA"]["more_than_lora"] == 0
    assert set(found) == {"LoRA", "DoRA", "LoRA with the head"}


def test_a_part_that_nobody_knows_is_refused_by_name(assets, tmp_path):
    with pytest.raises(SystemExit, match="There is no part 'cal'; the parts are call"):
        measure(assets, tmp_path, "cal")


def test_gaps_are_those_within_answers_and_with_spans_those_that_meet_one():
    answers = [[1.0, 2.0, 4.0], [10.0, 13.0]]

    assert gaps_of(answers) == [1.0, 2.0, 3.0]
    assert gaps_of(answers, [(3.0, 3.5)]) == [2.0]
    assert gaps_of(answers, []) == []


def test_gaps_apart_are_those_between_the_spans_and_none_before_and_behind():
    answers = [[1.0, 2.0, 4.0, 8.0, 9.0, 14.0, 30.0]]

    assert gaps_apart(answers, [(3.0, 3.5), (9.5, 10.0)]) == [4.0, 1.0]


def test_a_watch_that_fails_says_so():
    watch = GapWatch("http://x:y", "nobody", 1)
    with pytest.raises(AssertionError, match="the watch over an answer has failed"):
        watch.stop()


def test_a_step_is_compared_with_those_around_it_that_ran_alone():
    """Steps grow with their contexts: the last ones take twice as long as the first ones, whatever runs beside them."""
    seconds = [1.0 + number / 400 for number in range(400)]
    meets = [number % 4 == 0 for number in range(400)]
    seconds[200] *= 1.5
    ratios = compared(seconds, meets)
    assert ratios[200] == pytest.approx(1.5, rel=0.01)
    assert max(ratios[:200] + ratios[201:]) < 1.1
    assert compared([3.0], [True]) == [1.0]
