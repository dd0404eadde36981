"""The report says what was done, how requests ended, what was found, and on which machine."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

from .invariants import Invariants
from .ledger import Ledger
from .memory import growth_of
from .run import Plan

_MOST_POINTS = 120


def report(plan: Plan, ledger: Ledger, invariants: Invariants) -> dict[str, Any]:
    samples = invariants.samples
    growth = {role: growth_of(samples, role).row() for role in ("server", "engine")}
    stage = invariants.stage
    return {
        "date": str(date.today()),
        "command": " ".join(["python -m benchmarks.chaos", *sys.argv[1:]]),
        "machine": _machine(),
        "disk": str(stage.site.disk),
        "seed": plan.seed,
        "replicas": plan.replicas,
        "minutes": round(ledger.age_s / 60.0, 1),
        "rounds": ledger.round,
        "faults": dict(sorted(ledger.faults.items())),
        "requests": {"sent": ledger.sent, "ended": ledger.ended, "by_outcome": dict(ledger.outcomes.most_common())},
        "by_fault": {name: dict(counts.most_common()) for name, counts in sorted(ledger.by_fault.items())},
        "server_starts": stage.served.starts,
        "memory": growth,
        "most": {
            f"{role}_{what}": max(getattr(getattr(sample, role), what) for sample in samples)
            for role in ("server", "engine")
            for what in ("files", "threads")
        },
        "curve": [sample.row() for sample in samples[:: max(1, len(samples) // _MOST_POINTS)]],
        "violations": ledger.violations,
    }


def in_words(found: dict[str, Any]) -> str:
    """The same for a reader, without the curve."""
    requests = found["requests"]
    lines = [
        f"{found['rounds']} rounds in {found['minutes']} minutes, seed {found['seed']}; {found['machine']}",
        "faults: " + ", ".join(f"{name} {count}" for name, count in found["faults"].items()),
        f"requests: {requests['sent']} sent, {requests['ended']} ended: "
        + ", ".join(f"{outcome} {count}" for outcome, count in requests["by_outcome"].items()),
    ]
    for role, growth in found["memory"].items():
        judged = "" if growth["is_judged"] else ", too short a life to judge"
        lines.append(
            f"memory of the {role}: {growth['first_mb']} to {growth['last_mb']} MB ({growth['growth']:+.1%}) over "
            f"{growth['minutes']} minutes of one life{judged}"
        )
    lines += [f"VIOLATION in round {one['round']}, {one['fault']}: {one['what']}" for one in found["violations"]]
    return "\n".join(lines if found["violations"] else [*lines, "every invariant held after every fault"])


def _machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(": ")[2] if names else platform.machine()
    return f"{os.cpu_count()} cores, {name}, Python {platform.python_version()}, load {os.getloadavg()[2]:.1f}"
