"""Lets everything go wrong that can go wrong around a server, and looks after every fault whether anything is left.

    python -m benchmarks.chaos [--minutes 30] [--seed 1] [--json FILE] [--faults NAME,…] [--replicas 2]

`rota serve` with the built-in model runs in processes of its own, with keys and tenants' adapters. Each round sends
ordinary requests and lets one fault happen beside them. Then every request must have ended in exactly one way, and
nothing may be in use. The exit code is 1 if any promise was broken; the report has the events around it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from .faults import FAULTS
from .report import in_words, report
from .run import Plan, run


def main() -> None:
    options = _options()
    names = tuple(name.strip() for name in options.faults.split(",") if name.strip())
    if unknown := [name for name in names if name not in FAULTS]:
        sys.exit(f"There is no fault named {unknown[0]!r}; the faults are: {', '.join(FAULTS)}.")
    plan = Plan(options.seed, options.minutes, options.rounds, names, options.requests, options.replicas)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        ledger, invariants = asyncio.run(run(plan, Path(folder), lambda line: print(line, flush=True)))
        found = report(plan, ledger, invariants)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(in_words(found))
    sys.exit(1 if found["violations"] else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long faults go on")
    parser.add_argument("--rounds", type=int, help="end after so many rounds, however long they take")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same faults")
    parser.add_argument("--faults", default="", help="only these, with commas between them")
    parser.add_argument("--requests", type=int, default=6, help="ordinary requests in every round")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model that the server has")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
