"""The stages of a start are told in their order, and what ran at the same time is told as that."""

from __future__ import annotations

import pytest

from rota.core.stages import Stage, described, stage_fields, total_s

STAGES = (
    Stage("imports", 0.0, 3.1),
    Stage("kernels", 3.5, 2.2),  # while the weights are read
    Stage("weights", 3.51, 4.0),
    Stage("graphs", 7.505, 1.5),  # begins within a hundredth of a second of the end of the weights
)


def test_stages_that_overlap_stand_behind_the_longest_of_them():
    assert described(STAGES) == "imports 3.1, weights 4.0 (meanwhile kernels 2.2), graphs 1.5"


def test_a_stage_that_took_next_to_no_time_is_not_told():
    assert described((*STAGES[:1], Stage("memory", 3.2, 0.04))) == "imports 3.1"


def test_a_start_lasts_from_its_process_to_the_end_of_its_last_stage():
    assert total_s(STAGES) == pytest.approx(9.005)
    assert total_s(()) == 0.0


def test_a_log_line_has_them_only_if_they_are_known():
    assert stage_fields(STAGES[:1]) == {"seconds": 3.1, "stages": "imports 3.1"}
    assert stage_fields(()) == {}
