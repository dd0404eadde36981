"""Decode steps are captured once as CUDA graphs, one per batch size, and replayed with a single launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

# `Rows.accept_decodes` in, greedy tokens and logits out: a whole decode step. It must not look inside a tensor.
DecodeBody = Callable[[Tensor], tuple[Tensor, Tensor]]
# The inputs of a step of this size in which nobody decodes.
Padding = Callable[[int], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured step of one batch size and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [4, size] int32
    tokens: Tensor  # [size] int64, greedy
    logits: Tensor  # [size, vocabulary] float32, a view of a buffer that all graphs write to


def graph_sizes(rows: int) -> list[int]:
    """Batch sizes worth a graph of their own, up to and including `rows`; a step is padded to the next one."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, rows + 1, 16)]
    return [*(size for size in sizes if size < rows), rows]


class DecodeGraphs:
    """The graphs of all sizes. They share memory: a replay's logits last until the next replay."""

    def __init__(self, sizes: list[int], graphs: dict[int, DecodeGraph]) -> None:
        self._sizes = sizes
        self._graphs = graphs

    def width_for(self, decodes: int) -> int:
        """The smallest captured size that holds this many decodes."""
        return next(size for size in self._sizes if size >= decodes)

    def replay(self, inputs: NDArray[np.int32]) -> DecodeGraph:
        """Run the step of padded inputs [4, a captured size]; does not wait for the device."""
        graph = self._graphs[inputs.shape[1]]
        # The pinned copy may go when this returns: see `device.send`.
        graph.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        graph.graph.replay()
        return graph


def capture_graphs(
    body: DecodeBody, padding: Padding, rows: int, vocabulary: int, device: torch.device, quiet: bool
) -> DecodeGraphs:
    """Capture `body` at every size, over inputs that are only padding: nothing a ledger gives away is touched."""
    sizes = graph_sizes(rows)
    graphs: dict[int, DecodeGraph] = {}
    buffer = torch.empty(rows, vocabulary, dtype=torch.float32, device=device)
    pool = torch.cuda.graph_pool_handle()
    # Largest first: the smaller ones then fit into memory the pool already has.
    for size in tqdm(reversed(sizes), "Capturing CUDA graphs", len(sizes), leave=False, disable=quiet):
        inputs = torch.from_numpy(padding(size)).to(device)
        # Once outside the graph: kernels are compiled and workspaces allocated at their first use.
        body(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            tokens, logits = body(inputs)
            buffer[:size].copy_(logits)
        graphs[size] = DecodeGraph(graph, inputs, tokens, buffer[:size])
    return DecodeGraphs(sizes, graphs)
