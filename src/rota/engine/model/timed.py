"""The time that some calls take on a GPU, without the time of their launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ROUNDS = 3


def graph_milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """All calls once: the best of some rounds, in a graph, since a launch takes longer than a small product."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # see `capture_graphs`
        for call in calls:
            call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    graph.replay()
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in marks)
