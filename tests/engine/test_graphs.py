"""Capturing, with CUDA's part played by nobody: what a graph reads and writes is settled then."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rota.core.ids import Row
from rota.core.plan import Chunk, StepPlan
from rota.engine.step import graphs
from rota.engine.step.frames import MOST_CHUNKS, StepFrame, mixed_frame
from rota.engine.step.graphs import LARGE, WANTED_IF_LARGE, WANTED_OFTEN, GraphCapture, Kind, StepGraph, StepGraphs
from rota.engine.step.results import Computed

FRAMES = [StepFrame(1, page_changes=1), StepFrame(4, page_changes=4), mixed_frame(1, 32), mixed_frame(4, 8)]
KINDS = [(frame, has_adapters) for frame in FRAMES for has_adapters in (False, True)]


def sampled(frame: StepFrame) -> int:
    return frame.decodes + frame.sampled


def test_all_graphs_write_their_logits_to_the_same_place_whatever_they_hold(monkeypatch):
    """The largest step is captured first, and need not be the one that samples for most."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(graphs, "recorded", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    logits = torch.zeros(4 + MOST_CHUNKS, 7)

    def body(_inputs: Tensor, frame: StepFrame, _has_adapters: bool, logits: Tensor) -> Computed:
        rows = torch.zeros(sampled(frame))
        return Computed(rows, logits[: sampled(frame)], rows, rows, hidden=torch.zeros(frame.tokens, 3))

    def padding(frame: StepFrame, _has_adapters: bool) -> np.ndarray:
        return np.zeros(frame.numbers, np.int32)

    capture = GraphCapture(body, padding, logits)
    for frame, has_adapters in KINDS:
        computed = capture(frame, has_adapters).computed
        assert computed.logits.data_ptr() == logits.data_ptr()
        assert computed.logits.shape == (sampled(frame), 7)
        assert computed.hidden is None


class Captures:
    """Notes what is captured."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def __call__(self, frame: StepFrame, has_adapters: bool) -> StepGraph:
        self.kinds.append((frame, has_adapters))
        return cast(StepGraph, object())


def decodes(count: int) -> StepPlan:
    return StepPlan(step_id=0, decodes=tuple(map(Row, range(count))))


def test_when_idle_graphs_are_captured_one_by_one_until_all_are_there():
    captures = Captures()
    graphs = StepGraphs(KINDS, captures)
    rounds = 1
    while graphs.capture_next():
        rounds += 1
    assert (rounds, captures.kinds) == (len(KINDS), KINDS)
    assert not graphs.capture_next()
    assert captures.kinds == KINDS


def test_a_step_takes_the_smallest_frame_that_is_there():
    graphs = StepGraphs(KINDS, Captures())
    assert graphs.frame_for(decodes(1), has_adapters=False) is None
    graphs.capture((FRAMES[1], False))
    assert graphs.frame_for(decodes(1), has_adapters=False) is FRAMES[1]
    assert graphs.frame_for(decodes(1), has_adapters=True) is None
    assert graphs.frame_for(decodes(5), has_adapters=False) is None


def test_graphs_that_read_memory_of_before_are_captured_anew():
    captures = Captures()
    graphs = StepGraphs(KINDS, captures)
    while graphs.capture_next():
        pass
    plan = StepPlan(step_id=0, decodes=(Row(0),))

    graphs.forget(has_adapters=True)

    assert graphs.frame_for(plan, has_adapters=False) == FRAMES[0]
    assert graphs.frame_for(plan, has_adapters=True) is None
    while graphs.capture_next():
        pass
    assert captures.kinds[len(KINDS) :] == [kind for kind in KINDS if kind[1]]
    assert graphs.frame_for(plan, has_adapters=True) == FRAMES[0]


def test_a_graph_that_is_wanted_often_is_captured_though_nothing_is_ever_idle():
    captures = Captures()
    graphs = StepGraphs(KINDS, captures)
    found = [graphs.frame_for(decodes(3), has_adapters=True) for _ in range(WANTED_OFTEN + 2)]
    assert found == [None] * (WANTED_OFTEN - 1) + [FRAMES[1]] * 3
    assert captures.kinds == [(FRAMES[1], True)]


def test_a_large_graph_is_captured_sooner():
    large = mixed_frame(decodes=4, prompt_tokens=LARGE + 1)
    graphs = StepGraphs([(large, False)], Captures())
    chunk = Chunk(row=Row(0), start=0, length=LARGE, samples=True)
    plan = StepPlan(step_id=0, chunks=(chunk,))
    found = [graphs.frame_for(plan, has_adapters=False) for _ in range(WANTED_IF_LARGE)]
    assert found == [None] * (WANTED_IF_LARGE - 1) + [large]
