"""Clients that send nothing but grammars of the worst kind: they are answered in time, and nobody else waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.grammar_flood import flooded, gaps
from tests.server.letters import letters_device, serving
from tests.waiting import until

STEP_S = 0.01
# One check in the event loop's or the engine's thread would take longer, and so would the start of a process there.
LATE_S = 0.25


@pytest.mark.usefixtures("frozen_heap")
def test_a_flood_of_hostile_grammars_makes_nobody_elses_tokens_late(tmp_path: Path):
    with serving(tmp_path, letters_device(STEP_S), has_grammars=True) as client:
        client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"}).raise_for_status()
        with flooded(str(client.base_url), clients=2) as answers:
            assert until(lambda: len(answers) >= 4)
            # Other work on the machine may hold up some of these answers. A check in the way would hold up each.
            assert any(max(gaps(client, tokens=60)) < LATE_S for _ in range(8))
            assert until(lambda: len(answers) >= 16)

    assert {status for status, _ in answers} == {200, 400}
