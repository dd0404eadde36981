from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.counting import calls_in

PASSES = 25

# The most calls of Python's functions in a pass. A pass that lets 30 requests start takes about 5,000.
MOST_CALLS, MOST_CALLS_WITH_TENANTS = 6500, 8000

# Each at its smaller size. The shapes on disk must be larger than host memory.
SHAPES = {
    "pinned, 2,000 urgent for one adapter": 1 / 16,
    "pinned, 2,000 urgent for 2,000 adapters": 1 / 16,
    "120 prompts of 32k, KV for one": 1 / 8,
    "120 prompts of 32k, 120 adapters": 1 / 8,
    "256 rows grow without KV": 1 / 16,
    "10,000 wait for base, delayed": 1 / 16,
    "32 busy residents, 10,000 wait (wait)": 1 / 16,
    **{f"1,000 adapters, 128 in host memory ({policy})": 1 / 4 for policy in ("wait", "drain", "rotate")},
    **{f"1,000 adapters, 128 in host memory, no KV ({policy})": 1 / 4 for policy in ("wait", "drain")},
    **{f"5,000 adapters, 64 rows ({policy})": 1 / 32 for policy in ("wait", "drain", "rotate")},
    "1,000 parked (rotate)": 1 / 8,
    **{f"500 tenants of one adapter ({policy})": 1 / 16 for policy in ("wait", "drain", "rotate")},
}
WITH_TENANTS = {
    "500 tenants without room": 1 / 16,
    **{f"1,000 tenants, an adapter each ({policy})": 1 / 16 for policy in ("wait", "drain", "rotate")},
}


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import pass_shapes

    return pass_shapes


def costliest_pass(stage) -> int:
    """The most calls of Python's functions in one of many plans."""
    costs = []
    plan = stage.scheduler.plan

    def counted(now):
        calls, outcome = calls_in(lambda: plan(now))
        costs.append(calls)
        return outcome

    stage.scheduler.plan = counted
    for _ in range(PASSES):
        stage.step(lambda: None)
    return max(costs)


@pytest.mark.parametrize("name", [*SHAPES, *WITH_TENANTS])
def test_a_pass_is_cheap_and_costs_no_more_when_four_times_as_many_wait(benchmark, name):
    small = {**SHAPES, **WITH_TENANTS}[name]
    few, many = (costliest_pass(benchmark.shapes()[name](size)) for size in (small, 4 * small))

    assert many < 1.5 * few
    assert many < (MOST_CALLS if name in SHAPES else MOST_CALLS_WITH_TENANTS)
