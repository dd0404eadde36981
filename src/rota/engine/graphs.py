"""Decode steps are captured once as CUDA graphs, one per batch size, and replayed with a single launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

# Inputs, size and whether adapters take part in; greedy tokens and logits out: a whole decode step. It must not look
# inside a tensor.
DecodeBody = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
# The inputs of a step of this size, with adapters or without, in which nobody decodes.
Padding = Callable[[int, bool], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured step of one batch size and the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [numbers] int32: the four lines of `Rows.accept_decodes`, and slots behind them if it has adapters
    tokens: Tensor  # [size] int64, greedy
    logits: Tensor  # [size, vocabulary] float32, a view of a buffer that all graphs write to


def graph_sizes(rows: int) -> list[int]:
    """Batch sizes worth a graph of their own, up to and including `rows`; a step is padded to the next one."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, rows + 1, 16)]
    return [*(size for size in sizes if size < rows), rows]


class DecodeGraphs:
    """The graphs of all sizes, with adapters and without. They share memory: logits last until the next replay."""

    def __init__(self, sizes: list[int], graphs: dict[tuple[int, bool], DecodeGraph]) -> None:
        self._sizes = sizes
        self._graphs = graphs

    def width_for(self, decodes: int) -> int:
        """The smallest captured size that holds this many decodes."""
        return next(size for size in self._sizes if size >= decodes)

    def replay(self, inputs: NDArray[np.int32], size: int, has_adapters: bool) -> DecodeGraph:
        """Run the step of padded inputs of a captured size; does not wait for the device."""
        graph = self._graphs[size, has_adapters]
        # The pinned copy may go when this returns: see `device.send`.
        graph.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        graph.graph.replay()
        return graph


def capture_graphs(
    body: DecodeBody,
    padding: Padding,
    rows: int,
    vocabulary: int,
    device: torch.device,
    quiet: bool,
    has_bank: bool = False,
) -> DecodeGraphs:
    """Capture `body` at every size, over inputs that are only padding: nothing a ledger gives away is touched."""
    sizes = graph_sizes(rows)
    graphs: dict[tuple[int, bool], DecodeGraph] = {}
    buffer = torch.empty(rows, vocabulary, dtype=torch.float32, device=device)
    pool = torch.cuda.graph_pool_handle()
    # Largest first: the smaller ones then fit into memory the pool already has.
    kinds = list(itertools.product(reversed(sizes), (True, False) if has_bank else (False,)))
    for size, has_adapters in tqdm(kinds, "Capturing CUDA graphs", leave=False, disable=quiet):
        inputs = torch.from_numpy(padding(size, has_adapters)).to(device)
        # Once outside the graph: kernels are compiled and workspaces allocated at their first use.
        body(inputs, size, has_adapters)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            tokens, logits = body(inputs, size, has_adapters)
            buffer[:size].copy_(logits)
        graphs[size, has_adapters] = DecodeGraph(graph, inputs, tokens, buffer[:size])
    return DecodeGraphs(sizes, graphs)
