"""Runs are the workloads in the order they matter, and what each needs of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rota.core.errors import ConfigError
from rota.workload.scenario import Client, Scenario, read_scenario

from .shapes import ADAPTERS

SCENARIOS = Path(__file__).parents[1] / "scenarios"
FEW, ENOUGH = 3, 8  # slots; six adapters fit into eight
START_S = 25.0


Slots = int | Literal["auto"]
Options = tuple[tuple[str, Any], ...]
# As a user starts it who has read no page on flags.
BY_DEFAULT: Options = (("max_lora_rank", None),)


@dataclass(frozen=True, slots=True)
class Run:
    """One workload; `lasts_s` is about what it takes where it runs well."""

    name: str
    scenario: Scenario
    slots: Slots
    lasts_s: float
    is_timed: bool = False  # needs to see single steps, so the engine is in this process
    known: int = ADAPTERS  # adapters that its server knows, if its clients do not ask for more
    options: Options = ()  # beside those of every server; None leaves one out

    @property
    def adapters(self) -> int:
        """How many adapters its server knows."""
        return max(self.known, self.scenario.adapters)


def all_runs() -> list[Run]:
    """Grouped by server, since a start costs as much as a run; the most important first."""
    return [
        Run("tail-3-4", _tail(FEW, 4.0), FEW, 57),
        Run("tail-3-10", _tail(FEW, 10.0), FEW, 30),
        Run("closed-six", _closed(6), ENOUGH, 24),
        Run("closed-base", _closed(0), ENOUGH, 20),
        Run("closed-range", _closed(6, ratio=0.1), ENOUGH, 17),
        *(Run(f"long-rows-{count}", _long_rows(count), ENOUGH, 10) for count in (0, 1, 8)),
        Run("tail-all-4", _tail(ENOUGH, 4.0), ENOUGH, 55),
        Run("isolation-alone", _isolation(beside=False), ENOUGH, 38),
        Run("isolation", _isolation(beside=True), ENOUGH, 42),
        Run("tail-all-10", _tail(ENOUGH, 10.0), ENOUGH, 28),
        *_step_runs(),
        Run("loads", _loads(), FEW, 8, is_timed=True),
        Run("cancel-storm", _cancels(), FEW, 34),
        Run("many-200", _read("many-200", ENOUGH, requests=200), ENOUGH, 40),
        *_length_runs(),
        Run("default-six", _closed(6), "auto", 24, known=6, options=BY_DEFAULT),
        Run("distinct-64", _closed(64, distribution="distinct"), 64, 24),
        *_saturation_runs(),
    ]


def choose(names: str | None) -> list[Run]:
    """All runs, or those whose names begin with one of `names`, which have commas between them."""
    runs = all_runs()
    if names is None:
        return runs
    for name in names.split(","):
        if not any(run.name.startswith(name) for run in runs):
            raise ConfigError(f"There is no run '{name}'; the runs are {', '.join(run.name for run in runs)}.")
    return [run for run in runs if run.name.startswith(tuple(names.split(",")))]


def lengthened(run: Run, requests: int) -> Run:
    """The same with so many requests of each client, and the time that they take."""
    clients = tuple(replace(client, requests=requests) for client in run.scenario.clients)
    times = requests / max(client.requests for client in run.scenario.clients)
    return replace(run, scenario=replace(run.scenario, clients=clients), lasts_s=run.lasts_s * times)


def warm_up(adapters: int = ADAPTERS) -> Scenario:
    """Prompts and batches of every size with everybody, so that no measured request pays for a first time."""
    one = Client(
        requests=1, concurrency=1, prompt_tokens=(1, 2048), output_tokens=(1, 48), adapters=adapters, base_share=0.25
    )
    return Scenario(name="warm-up", clients=(replace(one, requests=8), replace(one, requests=96, concurrency=32)))


def _read(name: str, slots: int, **changes: Any) -> Scenario:
    found = read_scenario(SCENARIOS / f"{name}.toml")
    return replace(found, slots=slots, clients=tuple(replace(client, **changes) for client in found.clients))


def _tail(slots: int, rate: float) -> Scenario:
    return _read("tail-ttft", slots, rate_per_s=rate)


def _cancels() -> Scenario:
    """Half as long as the original."""
    found = _read("cancel-storm", FEW)
    clients = tuple(replace(client, requests=client.requests // 2) for client in found.clients)
    return replace(found, clients=clients, transients=found.transients // 2)


def _isolation(beside: bool) -> Scenario:
    """Sixty requests each, as the peers were asked; alone, only the base model's client."""
    found = _read("base-isolation", ENOUGH, requests=60)
    return found if beside else replace(found, clients=found.clients[:1])


def probe(adapters: int = 6) -> Scenario:
    """One short request for each adapter: whoever cannot be served any more shows."""
    client = Client(
        requests=adapters,
        rate_per_s=None,
        concurrency=adapters,
        prompt_tokens=(16, 16),
        output_tokens=(4, 4),
        adapters=adapters,
        distribution="distinct",
    )
    return Scenario(name="probe", slots=FEW, clients=(client,))


def _closed(adapters: int, ratio: float = 1.0, **changes: Any) -> Scenario:
    lengths = (int(512 * ratio), 512)
    client = Client(requests=256, concurrency=64, prompt_tokens=lengths, output_tokens=lengths, adapters=adapters)
    return Scenario(name="closed-loop", slots=ENOUGH, clients=(replace(client, **changes),))


def _saturation_runs() -> list[Run]:
    """As many at a time as rows allow: what a device does at most."""
    rows = 384
    options = (("max_running_requests", rows),)
    loads = {"base": _closed(0, requests=2 * rows, concurrency=rows)}
    loads |= {"16": _closed(ADAPTERS, requests=2 * rows, concurrency=rows)}
    return [Run(f"saturation-{word}", load, ADAPTERS, 32, options=options) for word, load in loads.items()]


def _long_rows(count: int) -> Scenario:
    """63 short rows of 600 tokens on average, alone or beside rows of 7,300 that last as long as all of them."""
    short = Client(requests=252, concurrency=63, prompt_tokens=(472, 472), output_tokens=(256, 256))
    if not count:
        return Scenario(name="long-rows-0", slots=ENOUGH, clients=(short,))
    long = Client(requests=count, concurrency=count, prompt_tokens=(6800, 6800), output_tokens=(1000, 1000))
    return Scenario(name=f"long-rows-{count}", slots=ENOUGH, clients=(long, short))


def _length_runs() -> list[Run]:
    """`osl-variance` with two requests for each that may be open: shorter than the original, alike in kind."""
    runs = []
    for concurrency, (word, ratio) in product((64, 128, 16, 32), (("fixed", 1.0), ("range", 0.8))):
        lengths = (int(1024 * ratio), 1024)
        changes = {"concurrency": concurrency, "prompt_tokens": lengths, "output_tokens": lengths}
        scenario = _read("osl-variance", ENOUGH, requests=2 * concurrency, **changes)
        lasts_s = 2 * 1024 * (0.005 + concurrency * 4e-5) + concurrency * 0.05
        runs.append(Run(f"osl-{concurrency}-{word}", scenario, ENOUGH, lasts_s))
    return runs


def _loads() -> Scenario:
    """The base model decodes steadily; a request of one token for another adapter now and then has it loaded."""
    steady = Client(requests=64, concurrency=64, prompt_tokens=(256, 256), output_tokens=(768, 768))
    callers = Client(requests=48, rate_per_s=12.0, prompt_tokens=(16, 16), output_tokens=(1, 1), adapters=ADAPTERS)
    return Scenario(name="loads", slots=FEW, clients=(steady, callers))


def _step_runs() -> list[Run]:
    """Steps to fit a cost model to: prompts of every length, most of them among decodes, with few and many adapters."""

    def run(requests: int, concurrency: int, adapters: int, outputs: tuple[int, int]) -> Run:
        client = Client(
            requests=requests,
            concurrency=concurrency,
            prompt_tokens=(16, 2048),
            output_tokens=outputs,
            adapters=adapters,
            base_share=0.2 if adapters else 0.0,
        )
        name = f"steps-{concurrency}-{adapters}"
        return Run(name, Scenario(name=name, slots=FEW, clients=(client,)), FEW, lasts_s=requests * 0.07, is_timed=True)

    return [
        run(160, 24, 3, (8, 96)),
        run(120, 24, 0, (8, 96)),
        run(160, 64, 1, (8, 192)),
        run(100, 8, 6, (8, 64)),
        run(24, 1, 0, (8, 32)),
    ]


def within(runs: Sequence[Run], seconds: float, in_process: bool) -> list[Run]:
    """The most important of the runs that fit together into the time."""
    chosen: list[Run] = []
    for run in runs:
        if _lasts_s([*chosen, run], in_process) <= seconds:
            chosen.append(run)
    return chosen


def group(runs: Sequence[Run], in_process: bool) -> list[list[Run]]:
    """Runs that can share a server: as many slots and adapters, the same options, and the engine in the same place.

    Engines in this process come last, since it never gives back all of the device's memory.
    """
    groups: dict[tuple[bool, Slots, int, Options], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.is_timed or in_process, run.slots, run.adapters, run.options), []).append(run)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _lasts_s(runs: Sequence[Run], in_process: bool) -> float:
    return sum(run.lasts_s for run in runs) + START_S * len(group(runs, in_process))
