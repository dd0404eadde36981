"""Joining makes the group that a rank belongs to: alone, on CPUs or on GPUs."""

from __future__ import annotations

import torch

from rota.engine.parallel.gpu_group import GPUGroup
from rota.engine.parallel.group import ONE_RANK, GlooGroup, Group


def join(rank: int, size: int, device: torch.device, meeting: str) -> Group:
    """Meet the other ranks at an address such as tcp://127.0.0.1:29500; waits for them."""
    if size == 1:
        return ONE_RANK
    if device.type == "cpu":
        return GlooGroup(rank, size, meeting)
    return GPUGroup.join(rank, size, device, meeting)
