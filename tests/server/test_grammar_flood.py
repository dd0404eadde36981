"""Clients that send nothing but grammars of the worst kind: they are answered in time, and nobody else waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.grammar_flood import HOSTILE, flooded
from tests.fakes import FakeDevice, alphabet
from tests.server.letters import serving
from tests.server.test_large_bodies import Pulse
from tests.waiting import until

# Of processor time, which a busy machine does not change: one check in the event loop's or the engine's thread takes
# longer, and so does the start of a process there.
LATE_S = 0.25


@pytest.mark.usefixtures("frozen_heap")
def test_a_flood_of_hostile_grammars_holds_up_neither_the_event_loop_nor_the_engine(tmp_path: Path):
    heartbeat, at, engine_s = Pulse(), dict[int, float](), list[float]()

    def next_letter(tokens: Sequence[int]) -> int:
        thread, now = threading.get_ident(), time.thread_time()
        engine_s.append(now - at.get(thread, now))
        at[thread] = now
        return alphabet(tokens)

    with serving(tmp_path, FakeDevice(next_token=next_letter), has_grammars=True, around=heartbeat.around) as client:
        client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"}).raise_for_status()
        with flooded(str(client.base_url), clients=2) as answers:
            while len(answers) < 2 * len(HOSTILE):
                count = len(answers)
                client.post("/v1/completions", json={"prompt": "a", "max_tokens": 60}).raise_for_status()
                assert until(lambda: len(answers) > count)  # noqa: B023

    assert {status for status, _ in answers} == {200, 400}
    assert max(heartbeat.longest_s, *engine_s) < LATE_S
