"""Draws the pictures of docs/policies.md.

python benchmarks/policy_pictures.py [--output docs/images]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from policies.prefill import DELAYER
from policies.runs import A100, DRAIN, H200, ROTATE, WAIT, record, scenario

from rota.core.policy_config import PolicyConfig
from rota.sim.plot import Picture, Tenures, plot
from rota.workload.scenario import Scenario


def draw(path: Path, asked: Scenario, cost: str, policies: dict[str, PolicyConfig], title: str) -> None:
    pictures = {}
    for name, policy in policies.items():
        tenures = Tenures()
        recorder = record(asked, cost, policy, 0, observers=[tenures])
        tenures.close()
        pictures[name] = Picture(recorder, tenures)
    plot(pictures, title, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="the folder to write into")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    three = {"wait": WAIT, "drain (2 s)": DRAIN, "rotate": ROTATE}
    two = {"wait": WAIT, "rotate": ROTATE}
    draw(folder / "tail-ttft.png", scenario("tail-ttft"), A100, three, "Six adapters, three slots, 4 requests a second")
    title = "Base requests (grey) and sixteen adapters on eight slots"
    draw(folder / "base-isolation.png", scenario("base-isolation"), A100, two, title)
    title = "Half as much again as the device can do, 32 adapters, eight slots"
    draw(folder / "overload.png", scenario("overload"), A100, three, title)
    closed = scenario("osl-variance")
    delayers = {"delayer off": ROTATE, "delayer on": DELAYER}
    draw(folder / "osl-variance.png", closed, H200, delayers, "64 at a time, answers of 819 to 1024 tokens")


if __name__ == "__main__":
    main()
