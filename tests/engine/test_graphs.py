"""Capturing, with CUDA's part played by nobody: what a graph reads and writes is settled then."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from rota.engine.step.computed import Computed
from rota.engine.step.frames import MOST_CHUNKS, Frame, mixed_frame
from rota.engine.step.graphs import capture_graphs

FRAMES = [Frame(1, page_changes=1), Frame(4, page_changes=4), mixed_frame(1, 32), mixed_frame(4, 8)]


def sampled(frame: Frame) -> int:
    return frame.decodes + frame.sampled


def test_all_graphs_write_their_logits_to_the_same_place_whatever_they_hold(monkeypatch):
    """The largest step is captured first, and need not be the one that samples for most."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    logits = torch.zeros(4 + MOST_CHUNKS, 7)

    def body(_inputs: Tensor, frame: Frame, _has_adapters: bool, logits: Tensor) -> Computed:
        rows = torch.zeros(sampled(frame))
        return Computed(rows, logits[: sampled(frame)], rows, rows, hidden=torch.zeros(frame.tokens, 3))

    def padding(frame: Frame, _has_adapters: bool) -> np.ndarray:
        return np.zeros(frame.numbers, np.int32)

    graphs = capture_graphs(body, padding, FRAMES, logits, quiet=True, has_bank=True)

    assert set(graphs._graphs) == {(frame, has_adapters) for frame in FRAMES for has_adapters in (False, True)}
    for (frame, _), graph in graphs._graphs.items():
        assert graph.computed.logits.data_ptr() == logits.data_ptr()
        assert graph.computed.logits.shape == (sampled(frame), 7)
        assert graph.computed.hidden is None
