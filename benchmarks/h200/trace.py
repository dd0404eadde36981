"""A trace of the profiler becomes kernels by step and family: what ran when, and when nothing did.

Every submit is marked on the host. A kernel belongs to the step whose mark its launch lies in:

    host     |- step 7 ----|      |- step 8 ----|
    launch       l l l                l l l
    device             k k k  .  k k k         k: kernels, .: idle
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "rota step"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# The first that matches; names are Triton's, cuBLAS's and PyTorch's, on a GPU and on a CPU.
FAMILIES = {
    "lora shrink": "shrink",
    "lora expand": "expand",
    "attention": "decode_kernel|combine_kernel|prefill_kernel|flash|fmha|attention",
    "norm": "rms_norm|layer_norm",
    "rope and store": "rotate_and_store",
    "silu": "silu",
    "sampling": "argmax|ArgMax|_choose|softmax|[Ss]ort|cumsum|searchsorted",
    "gemm": "gemm|gemv|nvjet|cutlass|cublas|xmma|split[Kk]|aten::(linear|mm|addmm|matmul|bmm)|onednn|mkl",
    "copies and small": "Memcpy|Memset|copy|scatter|gather|index|embedding|[Cc]at|elementwise|fill|aten::",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """Something that ran on the device (on a CPU: an outermost operation); times in microseconds."""

    name: str
    begin: float
    end: float
    step: int

    @property
    def family(self) -> str:
        return next((family for family, names in FAMILIES.items() if re.search(names, self.name)), "other")


def read_kernels(trace: dict[str, Any]) -> list[Kernel]:
    """All kernels of marked steps in order of their beginning, from a trace in Chrome's format."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted((float(event["ts"]), float(event["dur"])) for event in events if event["name"] == MARK)
    if any(event.get("cat") in ON_DEVICE for event in events):
        launched = {
            event["args"]["correlation"]: float(event["ts"])
            for event in events
            if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
        }
        ran = [event for event in events if event.get("cat") in ON_DEVICE]
        found = [(event, launched.get(event.get("args", {}).get("correlation"))) for event in ran]
    else:
        operations = _outermost(event for event in events if event.get("cat") == "cpu_op")
        found = [(event, float(event["ts"])) for event in operations]
    kernels = [
        Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]), step)
        for event, launched_at in found
        if (step := _step_at(marks, launched_at)) is not None
    ]
    return sorted(kernels, key=lambda kernel: kernel.begin)


def _step_at(marks: Sequence[tuple[float, float]], at: float | None) -> int | None:
    if at is None:
        return None
    step = bisect.bisect_right(marks, (at, float("inf"))) - 1
    return step if step >= 0 and at <= marks[step][0] + marks[step][1] else None


def _outermost(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operations that no other one called, of one thread."""
    found: list[dict[str, Any]] = []
    end = 0.0
    for event in sorted(events, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
        if float(event["ts"]) >= end:
            found.append(event)
            end = float(event["ts"]) + float(event["dur"])
    return found


@dataclass(frozen=True, slots=True)
class Profile:
    """Means over the whole steps of a trace; microseconds a step."""

    steps: int
    step_us: float
    busy_us: float
    between_us: float  # idle after the last kernel of a step and before the first of the next
    kernels: float
    families: dict[str, tuple[float, float]]  # microseconds and launches; those on several streams overlap
    others: dict[str, float]  # microseconds by name, of kernels that no family knows


def profile(kernels: Sequence[Kernel]) -> Profile:
    """What the device did from the second step's first kernel to the last step's: whole periods, no ends."""
    begins: dict[int, float] = {}
    for kernel in kernels:
        begins.setdefault(kernel.step, kernel.begin)
    first, *_, last = sorted(begins.values())[1:]
    steps = len(begins) - 2
    inside = [kernel for kernel in kernels if first <= kernel.begin < last]
    families: dict[str, tuple[float, float]] = {}
    others: dict[str, float] = {}
    busy, between, covered_until, step = 0.0, 0.0, first, inside[0].step
    for kernel in inside:
        lasts = kernel.end - kernel.begin
        spent, launches = families.get(kernel.family, (0.0, 0.0))
        families[kernel.family] = (spent + lasts / steps, launches + 1 / steps)
        if kernel.family == "other":
            others[kernel.name] = others.get(kernel.name, 0.0) + lasts / steps
        if kernel.step != step:
            between += max(0.0, kernel.begin - covered_until)
            step = kernel.step
        busy += max(0.0, min(kernel.end, last) - max(kernel.begin, covered_until))
        covered_until = max(covered_until, kernel.end)
    count = len(inside) / steps
    return Profile(steps, (last - first) / steps, busy / steps, between / steps, count, families, others)
