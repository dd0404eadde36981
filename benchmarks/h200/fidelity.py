"""Fidelity: a cost model fitted to measured steps, and the simulator's run with it beside the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rota.core.config import SchedulerConfig
from rota.core.options import build, options_of
from rota.core.policy_config import PolicyConfig
from rota.sim.calibrate import Fit, calibrate, read_timings, write_cost
from rota.sim.cost import LinearCost, read_cost
from rota.sim.run import Simulation, adapter_name, scheduler_config
from rota.workload.scenario import Client, Scenario

from .peers import TAIL_FIGURES, figure
from .results import Result

LIKE = "h200-llama8b"


def fit_costs(folder: Path, load_s: float | None) -> Fit | None:
    """Fit to FOLDER/step-timings.json, if it is there, and write the model beside it.

    Steps do not tell how long a load takes: without `load_s`, it is as in the model that comes with Rota.
    """
    source = folder / "step-timings.json"
    if not source.exists():
        return None
    like = read_cost(LIKE)
    if load_s is not None:
        like = replace(like, load_s=load_s)
    fit = calibrate(read_timings(source), like, LIKE)
    write_cost(fit, folder / f"{LIKE}.toml", source)
    return fit


def compare(
    costs: LinearCost, results: Mapping[str, Result], figures: Sequence[tuple[str, ...]] = TAIL_FIGURES
) -> dict[str, dict[str, Any]]:
    """For every open-loop run over six adapters: each figure real, simulated, and how far apart."""
    found = {}
    for name, result in results.items():
        if not name.startswith("tail"):
            continue
        simulated = simulate(costs, result)
        found[name] = {
            " ".join(path): _pair(figure(result["summary"], path), figure(simulated, path)) for path in figures
        }
    return found


def simulate(costs: LinearCost, result: Result) -> dict[str, Any]:
    """The same requests at the same moments under the same policy, in virtual time."""
    scenario, options = _scenario(result["scenario"]), result["options"]
    own = {name: value for name, value in options.items() if name in options_of(SchedulerConfig)}
    config = replace(scheduler_config(scenario), **own)
    policy = build(PolicyConfig, options)
    return (
        Simulation(scenario=scenario, costs=costs, policy=policy, seed=result["seed"], config=config)
        .run()
        .summary(adapter_name)
    )


def _scenario(described: Mapping[str, Any]) -> Scenario:
    """From what `results.describe` wrote; JSON has lists where a client has pairs."""

    def client(fields: dict[str, Any]) -> Client:
        pairs = {name: tuple(fields[name]) for name in ("prompt_tokens", "output_tokens")}
        return Client(**(fields | pairs))

    return Scenario(name="measured", slots=described["slots"], clients=tuple(map(client, described["clients"])))


def _pair(real: float, simulated: float) -> dict[str, float]:
    error = simulated / real - 1.0 if real else 0.0
    return {"real": round(real, 2), "simulated": round(simulated, 2), "error": round(error, 3)}
