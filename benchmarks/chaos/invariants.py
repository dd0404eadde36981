"""Invariants hold whenever the server is idle: nothing is in use, and no process holds more than at the start."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass, field
from typing import Any

from .processes import Held, children_of, files_of, held_by, state_of
from .served import NotServingError
from .site import ADAPTERS
from .stage import Stage

# How long what a fault left behind may take to go.
TIMEOUT_S = 60.0
_LOOK_S = 0.2
# asyncio's pool of worker threads grows to its size and stays; libraries open a file or two at their first use.
MORE_THREADS, MORE_FILES = 40, 6
# The one connection is that of the scrape.
_WANTED = {
    "rota_requests_waiting": 0.0,
    "rota_requests_running": 0.0,
    "rota_requests_parked": 0.0,
    "rota_kv_blocks_used": 0.0,
    "rota_slots_loading": 0.0,
    "rota_adapters_lost": 0.0,
    "rota_key_requests_open": 0.0,
    "rota_connections_open": 1.0,
}
# Series of keys come with their first requests.
_MAY_BE_MISSING = frozenset({"rota_key_requests_open"})
_STATES = ("num_running_reqs", "num_waiting_reqs", "num_parked_reqs", "kv_blocks_used")


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server and one engine hold at a moment at which the server is idle."""

    round: int
    at_s: float
    server: Held
    engine: Held
    children: int

    def row(self) -> dict[str, Any]:
        """For the report."""
        row: dict[str, Any] = {"round": self.round, "minute": round(self.at_s / 60.0, 2)}
        for role, held in (("server", self.server), ("engine", self.engine)):
            row |= {f"{role}_mb": held.rss_mb, f"{role}_files": held.files, f"{role}_threads": held.threads}
        return row | {"children": self.children, "server_pid": self.server.pid, "engine_pid": self.engine.pid}


@dataclass(slots=True)
class Invariants:
    """The first sample is what later ones are compared with."""

    stage: Stage
    samples: list[Sample] = field(default_factory=list)

    async def check(self) -> None:
        """Look until all invariants hold; write down those that do not within `TIMEOUT_S`."""
        ends_at = time.monotonic() + TIMEOUT_S
        while True:
            problems = await self._problems()
            if not problems or time.monotonic() > ends_at:
                break
            await asyncio.sleep(_LOOK_S)  # between two looks
        for problem in problems:
            self.stage.ledger.violate(f"idle, {TIMEOUT_S:g} seconds after the last request: {problem}")
        for folder in self.stage.site.left_over():
            shutil.rmtree(folder)  # it is told once
        await self._check_users()
        self._take_sample()

    async def _problems(self) -> list[str]:
        try:
            return [*self._of_gauges(await self.gauges()), *self._of_state(await self.stage.info()), *self._of_system()]
        except NotServingError as error:
            return [str(error)]

    async def gauges(self) -> dict[str, float]:
        """The sum over all series of every metric."""
        sums: dict[str, float] = {}
        for line in (await self.stage.read("/metrics")).decode().splitlines():
            if line and not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                name = series.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def _of_gauges(self, sums: dict[str, float]) -> list[str]:
        wanted = _WANTED | {"rota_engine_up": float(self.stage.served.replicas)}
        missing = wanted.keys() - sums.keys() - _MAY_BE_MISSING
        found = [f"{name} is missing" for name in sorted(missing)]
        found += [f"{name} is {sums[name]:g}" for name, value in wanted.items() if sums.get(name, value) != value]
        if sums.get("rota_slots_used", 0.0) > sums.get("rota_slots", 0.0):
            found.append("more slots are used than there are")
        return found

    def _of_state(self, info: dict[str, Any]) -> list[str]:
        states = info["internal_states"] or [{}]
        found = [
            f"/server_info says {name} is {state.get(name)}"
            for state in states
            for name in _STATES
            if state.get(name) != 0
        ]
        missing = {adapter.name for adapter in ADAPTERS} - set(info["loaded_adapters"])
        strange = {name for name in info["loaded_adapters"] if "-" in name} - {adapter.name for adapter in ADAPTERS}
        return found + [f"{what}: {sorted(names)}" for what, names in _named(missing, strange) if names]

    def _of_system(self) -> list[str]:
        site, served = self.stage.site, self.stage.served
        found = [f"a temporary folder is left: {folder.name}" for folder in site.left_over()]
        children = children_of(served.pid)
        found += [f"child {child} is a zombie" for child in children if state_of(child) == "Z"]
        engines = served.engines
        if len(engines) < served.replicas:
            return [*found, f"there are {len(engines)} engines of {served.replicas}"]
        if not self.samples:
            return found
        first = self.samples[0]
        if len(children) > first.children:
            found.append(f"{len(children)} child processes, {first.children} at the start")
        for role, now, then in (
            ("server", held_by(served.pid), first.server),
            *(("engine", held_by(engine), first.engine) for engine in engines),
        ):
            if now.files > then.files + MORE_FILES:
                found.append(f"the {role} has {now.files} open files, {then.files} at the start: {files_of(now.pid)}")
            if now.threads > then.threads + MORE_THREADS:
                found.append(f"the {role} has {now.threads} threads, {then.threads} at the start")
        return found

    async def _check_users(self) -> None:
        """An adapter with a user left cannot be unloaded; HTTP tells the number of users in no other way."""
        adapter = ADAPTERS[self.stage.ledger.round % len(ADAPTERS)]
        ending = await self.stage.ask(self.stage.unload(adapter))
        if "in the background" in ending.detail:
            self.stage.ledger.violate(f"idle, and {adapter.name} has a user left: {ending.detail}")
        await self.stage.ask(self.stage.load(adapter))

    def _take_sample(self) -> None:
        served, ledger = self.stage.served, self.stage.ledger
        engines = served.engines
        if not engines:
            return
        oldest = held_by(engines[0])  # it says most of how memory grows
        children = len(children_of(served.pid))
        self.samples.append(Sample(ledger.round, ledger.age_s, held_by(served.pid), oldest, children))


def _named(missing: set[str], strange: set[str]) -> list[tuple[str, set[str]]]:
    return [("adapters are missing", missing), ("adapters are loaded that should not be", strange)]
