"""Runs every target of the policies in the simulator, and says which hold.

python benchmarks/simulated_policies.py [--only NAME …] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from policies.crowd import many_adapters, overload
from policies.fidelity import fidelity
from policies.isolation import base_isolation
from policies.prefill import osl_variance
from policies.prefill_alone import delayer_report
from policies.report import Report
from policies.runs import A100, H200
from policies.tail import tail_ttft
from policies.target import Section, Target
from policies.tenants import every_adapter_a_tenant, neighbours, neighbours_slots
from scheduler_cost import every_policy

from rota.observe.summary import spread


def deciding() -> Section:
    """The median, since other processes share the cores."""
    section = Section("Cost of deciding", "python benchmarks/scheduler_cost.py")
    micros = spread(every_policy())["median"] * 1e6
    what = "a step with every policy on, 256 running, 10,000 waiting for 1,000 adapters"
    section.targets.append(Target(what, "≤ 500 µs", f"{micros:.0f} µs", micros <= 500.0))
    return section


SECTIONS: dict[str, Callable[[], Section]] = {
    "fidelity": fidelity,
    "tail-ttft": partial(tail_ttft, 4.0),
    "tail-ttft-8": partial(tail_ttft, 8.0),
    "base-isolation": partial(base_isolation, H200),
    "base-isolation-a100": partial(base_isolation, A100),
    "osl-variance": osl_variance,
    "delayer-report": delayer_report,
    "many-adapters": many_adapters,
    "overload": overload,
    "neighbours": neighbours,
    "neighbours-slots": neighbours_slots,
    "every-adapter-a-tenant": every_adapter_a_tenant,
    "deciding": deciding,
}


REPORT = Report(
    title="The policies in the simulator",
    command="python benchmarks/simulated_policies.py --output benchmarks/results",
    date="2026-11-16",
    machine="2 cores, Python 3.11",
    explained_in="docs/policies.md",
    page=Path("simulated-policies"),
    sections=SECTIONS,
)

if __name__ == "__main__":
    REPORT.main(__doc__)
