"""A chain of kernels: each one is launched while its forerunner still runs, and waits for it inside.

    forerunner   ---------- work ----------|
    kernel               launch, prefetch  |-- work ------

A launch, and first reads of what no forerunner writes, hide behind the forerunner's end. A kernel lets the next one
come only when its own wait is over. So whatever was written two kernels ago may be read before the wait, and when a
kernel has ended, all kernels before it have. It takes a Hopper GPU or a newer one.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_PROGRAMMATIC = True
CAPABILITY = (9, 0)
# Bytes that the device's memory moves together.
LINE = tl.constexpr(128)


def programmatic(at: Tensor) -> dict[str, bool]:
    """The arguments of a launch on a tensor's device that say whether it may begin early."""
    return {"PROGRAMMATIC": True, "launch_pdl": True} if is_programmatic(at.device) else {"PROGRAMMATIC": False}


def is_programmatic(device: torch.device) -> bool:
    return IS_PROGRAMMATIC and device.type == "cuda" and _is_able(device)


@lru_cache
def _is_able(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= CAPABILITY


@triton.jit
def follow(PROGRAMMATIC: tl.constexpr):
    """Wait until the forerunner has ended and can be seen; then the next kernel may come."""
    if PROGRAMMATIC:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at):
    """Bring the lines at these pointers into the device's cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
