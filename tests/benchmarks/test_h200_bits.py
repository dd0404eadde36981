"""The benchmark of steps in few bits runs on a tiny model, and tells steps by what they held."""

from __future__ import annotations

import json

import pytest

from benchmarks.h200.bits import at_most, by_size, main
from benchmarks.h200.timed import Step
from rota.core.ids import Row
from rota.core.plan import Chunk, StepPlan
from rota.engine.step.frames import mixed_frame
from rota.engine.step.graphs import StepGraphs
from tests.engine.hand import no_graph


def test_every_part_tells_what_it_found(tmp_path):
    out = tmp_path / "bits.json"
    main(["--shape", "tiny", "--kinds", "bf16", "--slots", "16", "--out", str(out)])
    found = json.loads(out.read_text())["bf16"]

    assert found["steps"]["64 six"]["median"] > 0
    assert found["prompts"]["base"] > 0
    assert set(found["loop"]) == {f"{who}, {way}" for who in ("base", "16") for way in ("as it is", "kernel by kernel")}
    assert found["loop"]["base, as it is"]["0 prompt tokens"]["steps"] > 0


def test_steps_are_told_apart_by_their_prompts():
    def step(prompt_tokens: int, ended_at: float) -> Step:
        return Step(
            decodes=4,
            prompt_tokens=prompt_tokens,
            context_tokens=0,
            adapters=0,
            began_at=0.0,
            ended_at=ended_at,
            submit_s=0.5,
            wait_s=0.0,
        )

    found = by_size([step(0, 1.0), step(0, 3.0), step(1, 5.0), step(512, 7.0), step(513, 9.0)])
    assert {size: told["steps"] for size, told in found.items()} == {
        "0 prompt tokens": 2,
        "512 prompt tokens": 2,
        "1024 prompt tokens": 1,
    }
    assert found["0 prompt tokens"]["seconds"] == pytest.approx(4.0)


def test_large_steps_go_without_a_graph_for_a_while():
    kind = (mixed_frame(decodes=4, prompt_tokens=64), False)
    graphs = StepGraphs([kind], no_graph)
    graphs.capture_next()
    plan = StepPlan(step_id=0, chunks=(Chunk(row=Row(0), start=0, length=40, samples=True),))

    with at_most(39):
        assert graphs.frame_for(plan, has_adapters=False) is None
    with at_most(40):
        assert graphs.frame_for(plan, has_adapters=False) == kind[0]
    assert graphs.frame_for(plan, has_adapters=False) == kind[0]
