"""Steps of common sizes are captured once as CUDA graphs and replayed with a single launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.plan import StepPlan
from rota.engine.progress import tracked
from rota.engine.step.computed import Computed
from rota.engine.step.frames import Frame

# A whole step: inputs, frame, whether adapters take part, and where logits go. It must not look inside a tensor.
StepBody = Callable[[Tensor, Frame, bool, Tensor], Computed]
# The inputs of a step in this frame, with adapters or without, that is all padding.
Padding = Callable[[Frame, bool], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step of one frame and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [numbers] int32: the frame's, and slots behind them if it has adapters
    computed: Computed  # its logits are a view of a buffer that all graphs write to


class StepGraphs:
    """The graphs of all frames, with adapters and without. They share memory: logits last until the next replay."""

    def __init__(self, frames: Iterable[Frame], graphs: dict[tuple[Frame, bool], StepGraph]) -> None:
        """Frames come smallest first."""
        self._decodes = [frame for frame in frames if not frame.chunks]
        self._mixed = [frame for frame in frames if frame.chunks]
        self._graphs = graphs

    def frame_for(self, plan: StepPlan) -> Frame | None:
        """The smallest frame that holds a step; None if it fits into none, or wants more of it than a graph gives."""
        if plan.scorings or plan.pools or not plan.tokens:
            return None
        frames = self._mixed if plan.chunks else self._decodes
        return next((frame for frame in frames if frame.holds(plan)), None)

    def replay(self, inputs: NDArray[np.int32], frame: Frame, has_adapters: bool) -> Computed:
        """Run the step of a frame's padded inputs; does not wait for the device."""
        graph = self._graphs[frame, has_adapters]
        # The pinned copy may go when this returns: see `device.send`.
        graph.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        graph.graph.replay()
        return graph.computed


def capture_graphs(
    body: StepBody,
    padding: Padding,
    frames: list[Frame],
    logits: Tensor,
    quiet: bool,
    has_bank: bool = False,
    ranks: int = 1,
) -> StepGraphs:
    """Capture `body` in every frame, over inputs that are only padding: nothing a ledger gives away is touched.

    All graphs write to the same `logits` [rows that sample at most, vocabulary]: one for each would take gigabytes.
    """
    graphs: dict[tuple[Frame, bool], StepGraph] = {}
    pool = torch.cuda.graph_pool_handle()
    # NCCL has a thread that looks after its sums; what it asks the device must not end a capture here.
    mode = "global" if ranks == 1 else "thread_local"
    # Largest first: the smaller ones then fit into memory the pool already has.
    largest_first = sorted(frames, key=lambda frame: frame.tokens, reverse=True)
    kinds = list(itertools.product(largest_first, (True, False) if has_bank else (False,)))
    for frame, has_adapters in tracked(kinds, "Capturing CUDA graphs", is_quiet=quiet):
        inputs = torch.from_numpy(padding(frame, has_adapters)).to(logits.device)
        # Once outside the graph: kernels are compiled and workspaces allocated at their first use.
        body(inputs, frame, has_adapters, logits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            computed = replace(body(inputs, frame, has_adapters, logits), hidden=None)
        graphs[frame, has_adapters] = StepGraph(graph, inputs, computed)
    return StepGraphs(frames, graphs)
