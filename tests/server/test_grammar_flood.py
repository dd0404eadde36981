"""Clients that send nothing but grammars of the worst kind: they are answered in time, and nobody else waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.grammar_flood import flooded, gaps
from rota.runtime.heap import freeze_heap
from tests.server.letters import letters_device, serving
from tests.waiting import until

STEP_S = 0.01
# One check in the event loop's or the engine's thread would take longer, and so would the start of a process there.
LATE_S = 0.25


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """As in a server. A collection would visit all objects of the test run meanwhile."""
    freeze_heap()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_heap")
def test_a_flood_of_hostile_grammars_makes_nobody_elses_tokens_late(tmp_path: Path):
    with serving(tmp_path, letters_device(STEP_S), has_grammars=True) as client:
        client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"}).raise_for_status()
        with flooded(str(client.base_url), clients=2) as answers:
            assert until(lambda: len(answers) >= 4)
            measured = gaps(client, tokens=300)
            assert until(lambda: len(answers) >= 16)

    assert max(measured) < LATE_S
    assert {status for status, _ in answers} == {200, 400}
    # A check has 0.8 seconds at most. The call may wait for another client's check, and for a worker's start.
    assert max(took_s for _, took_s in answers) < 3
