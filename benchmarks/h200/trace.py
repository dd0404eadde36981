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
ON_DEVICE_AGAIN = "gpu_user_annotation"
LAUNCHES = ("cuda_runtime", "cuda_driver")
# A step with this share of the kernels of the fullest one has all of them: a few come and go with page changes.
WHOLE = 0.9
# The first that matches; names are Triton's, cuBLAS's and PyTorch's, on a GPU and on a CPU.
FAMILIES = {
    "lora shrink": "shrink",
    "lora expand": "expand",
    "attention": "decode_kernel|combine_kernel|prefill_kernel|flash|fmha|attention",
    "norm": "rms_norm|layer_norm",
    "rope and store": "rotate_and_store",
    "silu": "silu",
    "sampling": "argmax|ArgMax|_choose|softmax|[Ss]ort|cumsum|searchsorted",
    "rounding": "round_rows",
    "gemm": "gemm|gemv|row_product|few_rows|nvjet|cutlass|cublas|xmma|split[Kk]|onednn|mkl"
    "|aten::(linear|mm|addmm|matmul|bmm)",
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
    # The profiler tells of a mark a second time, where the device did what lay in it: those are no steps of their own.
    told = [event for event in events if event["name"] == MARK and event.get("cat") != ON_DEVICE_AGAIN]
    marks = sorted((float(event["ts"]), float(event["dur"])) for event in told)
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
    names: dict[str, tuple[float, float]]  # the same by kernel


def profile(kernels: Sequence[Kernel]) -> Profile:
    """What the device did in the steps that the trace holds whole; the profiler loses kernels of some.

    device   | k k k   k k | k k k   k k | k k . . . . |
    step       whole         whole         not            a period ends where the next step begins
    """
    steps: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        steps.setdefault(kernel.step, []).append(kernel)
    most = max(map(len, steps.values()))
    whole = {step for step in sorted(steps)[1:] if len(steps[step]) >= WHOLE * most}
    measured = [step for step in whole if step + 1 in whole]
    families: dict[str, tuple[float, float]] = {}
    names: dict[str, tuple[float, float]] = {}
    lasted, busy, between = 0.0, 0.0, 0.0
    for step in measured:
        begin, next_begin = steps[step][0].begin, steps[step + 1][0].begin
        covered_until = begin
        for kernel in steps[step]:
            for told, key in ((families, kernel.family), (names, kernel.name)):
                spent, launches = told.get(key, (0.0, 0.0))
                told[key] = (spent + (kernel.end - kernel.begin) / len(measured), launches + 1 / len(measured))
            busy += max(0.0, kernel.end - max(kernel.begin, covered_until))
            covered_until = max(covered_until, kernel.end)
        lasted += next_begin - begin
        between += max(0.0, next_begin - covered_until)
    count = len(measured)
    total = sum(len(steps[step]) for step in measured) / count
    return Profile(count, lasted / count, busy / count, between / count, total, families, names)
