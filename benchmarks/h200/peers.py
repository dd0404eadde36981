"""What the peers do on one H200, and what Rota must and wants to do there; times in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# SGLang 0.5.15.post1 and vLLM 0.26.0 with the same shape, adapters and client, 2026-11-15. By run: the server, then
# TTFT mean, median, P99; E2E mean, median, P99; ITL median, P99, max; output tokens a second.
TAILS: dict[str, list[tuple[str, tuple[float | None, ...]]]] = {
    "tail-3-4": [
        ("SGLang", (4022, 1066, 19881, 7165, 5474, 24762, 11.7, 53.6, 151, 882)),
        ("SGLang, drain 1 s", (3269, 2596, 9993, 6381, 6255, 15361, 11.7, 51.1, 122, 820)),
        ("vLLM", (1491, 243, 7317, 3445, 3059, 10228, 7.4, 19.8, 135, 945)),
    ],
    "tail-3-10": [
        ("SGLang", (7823, 6790, 22615, 11421, 9216, 27199, 12.3, 61.5, 392, 1587)),
        ("SGLang, drain 1 s", (3623, 2967, 11368, 7052, 6231, 17451, 12.2, 61.7, 296, 1484)),
        ("vLLM", (3442, 324, 14895, 5532, 4015, 16613, 7.8, 19.8, 256, 1897)),
    ],
    "tail-all-4": [
        ("SGLang", (74, 68, 148, 3592, 3605, 7530, 11.9, 62.9, 193, None)),
        ("vLLM", (40, 38, 83, 2158, 2216, 4663, 8.1, 20.1, 94, None)),
    ],
    "tail-all-10": [
        ("SGLang", (97, 90, 161, 5342, 5415, 11918, 13.1, 116, 290, 2028)),
        ("vLLM", (51, 44, 119, 2641, 2635, 5541, 9.0, 24.3, 97, 2225)),
    ],
}
# The same for 200 adapters on 8 slots at 8 requests a second.
MANY: dict[str, list[tuple[str, tuple[float | None, ...]]]] = {
    "many-200": [("vLLM", (None, 4832, 21677, 10133, None, 25224, None, 41, 185, None))],
}
TAIL_FIGURES = (
    ("ttft_s", "mean"), ("ttft_s", "median"), ("ttft_s", "p99"),
    ("e2e_s", "mean"), ("e2e_s", "median"), ("e2e_s", "p99"),
    ("itl_s", "median"), ("itl_s", "p99"), ("itl_s", "max"), ("output_tokens_per_s",),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One figure of one run: what peers reach, what we must and what we want to; a rate is better when higher."""

    what: str
    run: str
    path: tuple[str, ...]
    sglang: float | None
    vllm: float | None
    must: float
    aim: float

    @property
    def is_rate(self) -> bool:
        return self.path[-1] == "output_tokens_per_s"

    def value(self, result: dict[str, Any]) -> float:
        """The run's figure in the unit of the target."""
        return figure(result["summary"], self.path)

    def verdict(self, value: float) -> str:
        def reaches(wanted: float) -> bool:
            return value >= wanted if self.is_rate else value <= wanted

        return "aim" if reaches(self.aim) else "must" if reaches(self.must) else "MISSED"


def figure(summary: dict[str, Any], path: tuple[str, ...]) -> float:
    """A number of a summary by its path; durations in milliseconds."""
    found: Any = summary
    for name in path:
        found = found[name]
    return float(found) if path[-1] == "output_tokens_per_s" else float(found) * 1000


RATE, TTFT, E2E, ITL = ("output_tokens_per_s",), "ttft_s", "e2e_s", "itl_s"
TARGETS = (
    Target("closed loop 64, six adapters, tok/s", "closed-six", RATE, 3985, 5097, 6000, 8000),
    Target("closed loop 64, base only, tok/s", "closed-base", RATE, 4951, 7471, 7500, 9000),
    Target("closed loop 64, from 10 %, six adapters, tok/s", "closed-range", RATE, 2822, 4217, 5000, 6500),
    Target("tail, slots for all, 4/s, ITL median", "tail-all-4", (ITL, "median"), 11.9, 8.1, 6.5, 5.5),
    Target("tail, slots for all, 4/s, TTFT median", "tail-all-4", (TTFT, "median"), 68, 38, 35, 25),
    Target("tail, slots for all, 4/s, TTFT P99", "tail-all-4", (TTFT, "p99"), 148, 83, 80, 50),
    Target("tail, 3 slots, 4/s, TTFT median", "tail-3-4", (TTFT, "median"), 1066, 243, 80, 50),
    Target("tail, 3 slots, 4/s, TTFT P99", "tail-3-4", (TTFT, "p99"), 19881, 7317, 500, 250),
    Target("tail, 3 slots, 4/s, E2E mean", "tail-3-4", (E2E, "mean"), 7165, 3445, 3400, 2600),
    Target("tail, 3 slots, 4/s, E2E P99", "tail-3-4", (E2E, "p99"), 24762, 10228, 8500, 6500),
    Target("tail, 3 slots, 10/s, TTFT median", "tail-3-10", (TTFT, "median"), 6790, 324, 120, 60),
    Target("tail, 3 slots, 10/s, TTFT P99", "tail-3-10", (TTFT, "p99"), 22615, 14895, 700, 350),
    Target("tail, 3 slots, 10/s, E2E mean", "tail-3-10", (E2E, "mean"), 11421, 5532, 5000, 4000),
    Target("tail, 3 slots, 10/s, E2E P99", "tail-3-10", (E2E, "p99"), 27199, 16613, 12000, 9000),
    Target("isolation, base alone, TTFT mean", "isolation-alone", (TTFT, "mean"), 63, 52, 45, 35),
    Target("isolation, base beside adapters, TTFT mean", "isolation", ("base", TTFT, "mean"), 89, 99, 60, 45),
    Target("isolation, adapters' TTFT P99", "isolation", ("tuned", TTFT, "p99"), 11557, 6257, 800, 400),
    Target("closed loop 64, six adapters, default flags, tok/s", "default-six", RATE, None, None, 7345, 8000),
    Target("closed loop 384, base only, tok/s", "saturation-base", RATE, None, 9980, 13601, 16000),
    Target("closed loop 384, 16 adapters, tok/s", "saturation-16", RATE, None, 8765, 12017, 15000),
    Target("closed loop 64, 64 adapters, tok/s", "distinct-64", RATE, None, None, 6118, 7000),
)
# Further figures of base-isolation: (what, run, path, SGLang, vLLM).
ISOLATION = (
    ("base beside, TTFT P99", "isolation", ("base", TTFT, "p99"), 189, 234),
    ("adapters' TTFT mean", "isolation", ("tuned", TTFT, "mean"), 2272, 1145),
    ("base alone, E2E mean", "isolation-alone", (E2E, "mean"), 6252, 3395),
    ("base beside, E2E mean", "isolation", ("base", E2E, "mean"), 8361, 6085),
)
# Seconds from the start to the first answer, weights on local disk: SGLang, vLLM, must, aim.
START = ("69–74", "107", 30.0, 12.0)
