"""Steps of common sizes are captured once as CUDA graphs and replayed with a single launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.plan import StepPlan
from rota.engine.step.frames import StepFrame
from rota.engine.step.results import Computed

# A whole step: inputs, frame, whether adapters take part, and where logits go. It must not look inside a tensor.
StepBody = Callable[[Tensor, StepFrame, bool, Tensor], Computed]
# The inputs of a step in this frame, with adapters or without, that is all padding.
Padding = Callable[[StepFrame, bool], NDArray[np.int32]]


# A frame, and whether adapters take part.
Kind = tuple[StepFrame, bool]
# While steps wait: a capture launches a step twice, some 50 ms for Llama-8B, and its graph saves a step some 3 ms.
WANTED_OFTEN = 16
# Frames of more tokens are a light model's. There a graph saves 15 ms or more, and its capture takes some 85 (FP8).
LARGE, WANTED_IF_LARGE = 1024, 6


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step of one frame and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [numbers] int32: the frame's, and slots behind them if it has adapters
    computed: Computed  # its logits are a view of a buffer that all graphs write to


class StepGraphs:
    """Graphs by frame, with adapters and without. They share memory: logits last until the next replay.

    Each is captured when nothing else is to do, or when a step has wanted it some times: until then a step takes the
    next larger frame, or none.
    """

    def __init__(self, kinds: Iterable[Kind], capture: Callable[[StepFrame, bool], StepGraph]) -> None:
        """Kinds come in the order in which they are captured."""
        self._capture = capture
        self._graphs: dict[Kind, StepGraph] = {}
        # How often a step has wanted a kind that is not there yet.
        self._missing: dict[Kind, int] = dict.fromkeys(kinds, 0)
        self._frames: dict[tuple[bool, bool], list[StepFrame]] = {}
        for frame, has_adapters in sorted(self._missing, key=lambda kind: (kind[0].tokens, kind[0].decodes)):
            self._frames.setdefault((bool(frame.chunks), has_adapters), []).append(frame)

    def capture_next(self) -> bool:
        """Capture one graph that is not there yet; False if there is none."""
        if self._missing:
            self.capture(next(iter(self._missing)))
        return bool(self._missing)

    def capture(self, kind: Kind) -> None:
        self._graphs[kind] = self._capture(*kind)
        del self._missing[kind]

    def forget(self, has_adapters: bool) -> None:
        """Capture those with adapters, or those without, anew when they are wanted; none may be running."""
        for kind in [kind for kind in self._graphs if kind[1] == has_adapters]:
            del self._graphs[kind]
            self._missing[kind] = 0

    def frame_for(self, plan: StepPlan, has_adapters: bool) -> StepFrame | None:
        """The smallest frame that holds a step; None if it fits into none, or wants more of it than a graph gives."""
        if plan.scorings or plan.pools or not plan.tokens:
            return None
        for frame in self._frames.get((bool(plan.chunks), has_adapters), ()):
            if frame.holds(plan) and self._is_there((frame, has_adapters)):
                return frame
        return None

    def replay(self, inputs: NDArray[np.int32], frame: StepFrame, has_adapters: bool) -> Computed:
        """Run the step of a frame's padded inputs; does not wait for the device."""
        graph = self._graphs[frame, has_adapters]
        # The pinned copy may go when this returns: see `device.send`.
        graph.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        graph.graph.replay()
        return graph.computed

    def _is_there(self, kind: Kind) -> bool:
        """A server that is never idle must have its graphs too: they are captured when they are wanted often enough."""
        if kind in self._missing:
            self._missing[kind] += 1
            if self._missing[kind] < (WANTED_IF_LARGE if kind[0].prompt_tokens > LARGE else WANTED_OFTEN):
                return False
            self.capture(kind)
        return True


class GraphCapture:
    """Captures a step over inputs that are only padding: nothing a ledger gives away is touched.

    All graphs write to the same `logits` [rows that sample at most, vocabulary]: one for each would take gigabytes.
    """

    def __init__(self, body: StepBody, padding: Padding, logits: Tensor) -> None:
        self._body, self._padding, self._logits = body, padding, logits
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(logits.device)

    def __call__(self, frame: StepFrame, has_adapters: bool) -> StepGraph:
        inputs = torch.from_numpy(self._padding(frame, has_adapters)).to(self._logits.device)
        # Once outside the graph: kernels are compiled and workspaces allocated at their first use.
        self._body(inputs, frame, has_adapters, self._logits)
        graph = torch.cuda.CUDAGraph()
        with recorded(graph, self._pool, self._stream):
            computed = replace(self._body(inputs, frame, has_adapters, self._logits), hidden=None)
        return StepGraph(graph, inputs, computed)


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """As `torch.cuda.graph` does, but the device is not waited for, and memory that is free stays allocated."""
    usual = torch.cuda.current_stream(stream.device)
    stream.wait_stream(usual)
    with torch.cuda.stream(stream):
        # Other threads copy adapters meanwhile, and NCCL has one that looks after its sums; what they ask the device
        # must not end a capture here.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    usual.wait_stream(stream)
