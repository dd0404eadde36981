"""`rota simulate` runs a scenario in virtual time, under one policy or several side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import typer

from rota.commands.flags import check_outputs, config_file, make_command, parameter, quiet_flag, with_file
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.errors import ConfigError
from rota.core.events import Event, Finished
from rota.core.ids import AdapterId, RequestId
from rota.core.options import at_least, build, option, options_of, refuse_unless
from rota.core.policy_config import PolicyConfig
from rota.engine.progress import Progress
from rota.observe.journal import Journal
from rota.observe.observer import Observer
from rota.observe.slot_pressure import SlotPressure, SlotShortage
from rota.observe.summary import Recorder, mean_of
from rota.observe.table import print_table
from rota.policy.policy_options import policy_config
from rota.policy.slot_policies import check_slot_policy
from rota.runtime.replicas.face import Rule
from rota.sim.cost import LinearCost, read_cost
from rota.sim.run import Simulation, adapter_name, lora_config, scheduler_config
from rota.workload.scenario import Scenario, read_scenario

# The LoRA flags of `rota serve` that a scheduler reads. The others are about weights, and a simulation has none.
SCHEDULED = ("max_loaded_loras", "lora_eviction_policy", "enable_lora_overlap_loading")
SERVED = options_of(LoraConfig)


def _as_served(name: str) -> Any:
    return option(SERVED[name].default, SERVED[name].help)


@dataclass(frozen=True, slots=True)
class SimulateConfig:
    """The options of a simulation, and where its results go."""

    compare: str | None = option(None, "Policies to put side by side, with commas: wait,drain,rotate.")
    replicas: int = option(1, "Replicas in one virtual time, each as the scenario describes a server.")
    routers: str | None = option(
        None, "Routers to put side by side, with commas: adapters,round-robin,shortest-queue. Left out: adapters."
    )
    fronts: int = option(1, "Servers that share the replicas evenly, each with a router of its own.")
    balancer: Literal["random", "adapter", "picker"] = option(
        "random", "What chooses a front: chance, the adapter's name, or the scores of Kubernetes' endpoint picker."
    )
    adds_on_demand: bool = option(
        False,
        "Tell a replica of an adapter with the first request for it, not of all adapters at the start: for thousands "
        "of adapters on hundreds of replicas.",
    )
    cost: str = option("a100-llama8b", "How long steps take: the name of a cost model of Rota, or a TOML file.")
    slots: int | None = option(None, "Adapters that a step may hold; left out: the scenario's number.")
    max_loras_per_batch: int | Literal["auto"] = option(
        "auto", "The same as slots, under the name that 'rota serve' uses."
    )
    max_loaded_loras: int | None = option(
        None, f"{SERVED['max_loaded_loras'].help} Left out: what the scenario says, or 128 as for 'rota serve'."
    )
    lora_eviction_policy: Literal["lru", "fifo"] = _as_served("lora_eviction_policy")
    enable_lora_overlap_loading: bool = _as_served("enable_lora_overlap_loading")
    seed: int = option(0, "The first random seed. The same seed gives exactly the same run.")
    seeds: int = option(1, "How many seeds to run; the numbers are means over them.")
    per_adapter: bool = option(False, "Also print a table of adapters for every policy.")
    per_replica: bool = option(False, "Also print a table of replicas for every policy or router.")
    json: str | None = option(None, "Write the numbers to this file.")
    plot: str | None = option(
        None, "Draw times to first token and slots over time, for the first seed (.png, .svg, .pdf)."
    )
    journal: str | None = option(None, "Write every event of a single run to this file, one line of JSON each.")
    calibrate: str | None = option(
        None,
        "Fit a cost model to measured steps (a JSON file), write it beside that file as TOML, and simulate with it.",
    )

    def __post_init__(self) -> None:
        at_least(1, self, "seeds", "replicas", "fronts")
        if self.compare and self.routers:
            raise ConfigError("compare puts policies side by side, and routers routers; give one of them.")
        if self.routers and self.replicas == 1:
            raise ConfigError("routers needs replicas of at least 2: one replica takes all requests.")
        if self.replicas % self.fronts:
            raise ConfigError(f"fronts must divide replicas: {self.fronts} cannot share {self.replicas} evenly.")
        refuse_unless(lambda value: value >= 0, "not be below 0", self, "slots", "max_loras_per_batch")
        if self.slots is not None and self.max_loras_per_batch not in ("auto", self.slots):
            raise ConfigError(
                f"slots is {self.slots} and max_loras_per_batch {self.max_loras_per_batch}, but they are the same "
                "thing; give one of them."
            )
        if self.journal and (self.compare or len(_names_of(self.routers)) > 1 or self.seeds > 1):
            raise ConfigError("journal follows a single run: leave out compare, seeds and all routers but one.")

    @property
    def asked_slots(self) -> int | None:
        """None: the scenario's number."""
        return self.slots if self.max_loras_per_batch == "auto" else self.max_loras_per_batch


SIMULATE_CONFIGS = (SimulateConfig, PolicyConfig, SchedulerConfig)


def simulate_command() -> Callable[..., None]:
    return make_command(
        simulate,
        "Run SCENARIO in virtual time with the real scheduler, and print the figures of its requests. Unless flags say "
        "otherwise, the scenario sets how many requests run at a time, and prefixes are not cached.",
        options_of(*SIMULATE_CONFIGS).values(),
        parameter(
            "scenario",
            Path | None,
            typer.Argument(None, metavar="SCENARIO", help="A scenario file (benchmarks/scenarios/*.toml)."),
        ),
        config_file(),
        quiet_flag(),
    )


def simulate(given: dict[str, Any]) -> None:
    chosen = with_file(given, *SIMULATE_CONFIGS)
    asked = build(SimulateConfig, chosen)
    check_outputs((asked.json, asked.journal), asked.plot)
    costs = _calibrated(asked) if asked.calibrate else read_cost(asked.cost)
    if asked.calibrate and chosen.get("scenario") is None:
        return
    scenario = _scenario(chosen.get("scenario"), asked)
    if asked.plot:
        from rota.sim import plot as plots  # imported here, because it loads matplotlib
    slots = asked.asked_slots
    config = replace(scheduler_config(scenario), **_among(options_of(SchedulerConfig), chosen))
    lora = replace(lora_config(scenario, slots), **_among(SCHEDULED, chosen))
    variants = variants_of(asked, policy_config(chosen, _names_of(asked.compare)))
    summaries, pictures = {}, {}
    shortages: dict[str, SlotShortage | None] = {}
    with _counting(scenario, asked.seeds * len(variants), chosen) as endings, _journal(asked) as journals:
        for variant in variants:
            runs = []
            for seed in range(asked.seed, asked.seed + asked.seeds):
                pressure = SlotPressure(lambda _: (scenario.slots if slots is None else slots, 0))
                observers: list[Observer] = [endings, pressure, *journals]
                is_drawn = asked.plot and seed == asked.seed
                if is_drawn:
                    observers.append(tenures := plots.Tenures())
                simulation = Simulation(
                    scenario=scenario,
                    costs=costs,
                    policy=variant.policy,
                    recorder=Recorder(reader_pace=variant.policy.reader_pace),
                    seed=seed,
                    slots=slots,
                    config=config,
                    lora=lora,
                    observers=observers,
                    replicas=asked.replicas,
                    router=variant.router,
                    fronts=asked.fronts,
                    balancer=asked.balancer,
                    adds_on_demand=asked.adds_on_demand,
                )
                recorder = simulation.run()
                runs.append(simulation.summary())
                shortages[variant.label] = pressure.worst or shortages.get(variant.label)
                if is_drawn:
                    tenures.close()
                    pictures[variant.label] = plots.Picture(recorder, tenures, simulation.starts_at)
            summaries[variant.name] = mean_of(runs)
    print_table({one.label: summaries[one.name] for one in variants}, asked.per_adapter, asked.per_replica)
    print(*(f"{name}: {shortage}\n" for name, shortage in shortages.items() if shortage), sep="", end="")
    if asked.json:
        _write(summaries, asked, Path(asked.json))
    if asked.plot:
        plots.plot(pictures, f"{scenario.name}: {scenario.about}", Path(asked.plot))


def _scenario(path: Path | None, asked: SimulateConfig) -> Scenario:
    if path is None:
        raise ConfigError("Name a scenario file; benchmarks/scenarios holds some.")
    scenario = read_scenario(path)
    if asked.adds_on_demand and scenario.transients:
        raise ConfigError(
            "adds_on_demand is not for scenarios with transients: these wait until all replicas have them."
        )
    return scenario


def _write(summaries: dict[str, Any], asked: SimulateConfig, path: Path) -> None:
    several = "policies" if asked.compare else "routers" if asked.routers else None
    shown = {several: summaries} if several else next(iter(summaries.values()))
    path.write_text(json.dumps(shown, indent=1) + "\n", "utf-8")


def _among(names: Iterable[str], chosen: dict[str, Any]) -> dict[str, Any]:
    return {name: chosen[name] for name in names if name in chosen}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of the things that a run puts side by side."""

    name: str
    label: str
    policy: PolicyConfig
    router: Rule = "adapters"


def variants_of(asked: SimulateConfig, policy: PolicyConfig) -> list[Variant]:
    """The policies to run, or the routers under one policy."""
    names = dict.fromkeys(_names_of(asked.compare) or [policy.lora_policy])
    for name in names:
        check_slot_policy(name, "compare" if asked.compare else "lora_policy")
    policies = [replace(policy, lora_policy=name) for name in names]
    if not asked.routers:
        return [Variant(name=one.lora_policy, label=label(one), policy=one) for one in policies]
    (one,) = policies
    return [Variant(name=name, label=name, policy=one, router=_router(name)) for name in _names_of(asked.routers)]


def _router(name: str) -> Rule:
    for known in get_args(Rule):
        if name == known:
            return known
    raise ConfigError(f"There is no router '{name}'; known are {', '.join(get_args(Rule))}.")


def _names_of(compare: str | None) -> list[str]:
    return [name.strip() for name in compare.split(",")] if compare else []


def label(policy: PolicyConfig) -> str:
    drains = policy.lora_policy == "drain"
    return f"drain ({policy.lora_drain_wait_threshold:g} s)" if drains else policy.lora_policy


def _calibrated(asked: SimulateConfig) -> LinearCost:
    from rota.sim.calibrate import calibrate, read_timings, write_cost

    assert asked.calibrate is not None
    source = Path(asked.calibrate)
    target = source.with_suffix(".toml")
    fit = calibrate(read_timings(source), read_cost(asked.cost), target.stem)
    write_cost(fit, target, source)
    print(f"{target}: {fit}")
    return fit.cost


class _Endings:
    """An observer that counts ended requests for the progress bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        """Only an end counts."""

    def observe(self, events: Iterable[Event]) -> None:
        if ended := sum(isinstance(event, Finished) for event in events):
            self._progress.update(ended)


@contextmanager
def _counting(scenario: Scenario, runs: int, chosen: dict[str, Any]) -> Iterator[_Endings]:
    transients = scenario.transients * scenario.transient_requests
    total = runs * (sum(client.requests for client in scenario.clients) + transients)
    with Progress("Simulating", total, "requests", chosen.get("quiet", False)) as progress:
        yield _Endings(progress)


@contextmanager
def _journal(asked: SimulateConfig) -> Iterator[list[Journal]]:
    if asked.journal is None:
        yield []
        return
    with Path(asked.journal).open("wb") as file:
        journal = Journal(file, adapter_name)
        yield [journal]
        journal.close()
