"""NCCL's sums and gathers in a group of one, outside a graph and in one: two ranks on a device it refuses.

python -m benchmarks.parallel.nccl MEETING
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from rota.engine.parallel.gpu_group import ONE_SHOT_BYTES, GPUGroup
from rota.engine.parallel.group import meet

REPLAYS = 100


def no_sum(_x: Tensor) -> Tensor:
    raise AssertionError("every sum here is large enough for NCCL")


@torch.inference_mode()
def measure(meeting: str) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    meet(0, 1, meeting)
    group = GPUGroup(0, 1, one_shot=no_sum)
    x = torch.randn(1024, 4096, device=device, dtype=torch.bfloat16)
    assert x.nbytes > ONE_SHOT_BYTES, "smaller sums do not go through NCCL"
    right = 2 * x
    is_right_outside = torch.equal(group.sum(x + x), right) and torch.equal(group.gather(right)[0], right)
    graph, total = torch.cuda.CUDAGraph(), torch.empty_like(x)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total.copy_(group.sum(x + x))
    total.zero_()
    graph.replay()
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begins.record()
    for _ in range(REPLAYS):
        graph.replay()
    ends.record()
    torch.cuda.synchronize()
    told = {
        "world": 1,
        "right outside a graph": bool(is_right_outside),
        "right in a graph": torch.equal(total, right),
        "replay_us": round(begins.elapsed_time(ends) / REPLAYS * 1e3, 1),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    group.close()
    return told


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
