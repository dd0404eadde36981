"""A run is a number of rounds: ordinary requests, one fault beside them, and then a look at what must hold."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from .deck import Deck
from .disk import Disk
from .faults import Fault
from .faults.fault import until
from .invariants import Invariants
from .ledger import Allowed, Ledger
from .memory import growth_of, problems_with
from .processes import state_of
from .served import NotServingError, Served
from .site import Site
from .stage import Stage

_LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of a run: it ends after a time, or after a number of rounds."""

    seed: int
    minutes: float = 30.0
    rounds: int | None = None
    faults: tuple[str, ...] = ()
    requests: int = 6
    replicas: int = 1

    def progress(self, ledger: Ledger) -> float:
        if self.rounds is not None:
            # The rounds of a short run name their faults, and all of them may come.
            return 1.0 if ledger.round >= self.rounds else 0.0
        return ledger.age_s / 60.0 / self.minutes


async def run(plan: Plan, folder: Path, say: Callable[[str], None]) -> tuple[Ledger, Invariants]:
    """Raises NotServingError only if the server does not start at all."""
    folder = folder.resolve()
    site = Site(folder, Disk(folder / "disk"))
    served = Served(site, plan.replicas)
    stage = Stage(site, served, Ledger(), plan.requests)
    invariants = Invariants(stage)
    try:
        await _begin(stage, invariants, plan)
        deck = Deck(Random(plan.seed), plan.faults)
        while (progress := plan.progress(stage.ledger)) < 1.0:
            fault = deck.deal(progress)
            known = len(stage.ledger.violations)
            await _round(stage, invariants, fault, Random(f"{plan.seed}/{stage.ledger.round + 1}"))
            say(_line(stage.ledger, invariants))
            for violation in stage.ledger.violations[known:]:
                violation["log"] = served.last_lines(_LOG_LINES)
                say(f"VIOLATION: {violation['what']}")
        await _end(stage)
    finally:
        served.kill()
        site.disk.close()
    for problem in problems_with({role: growth_of(invariants.samples, role) for role in ("server", "engine")}):
        stage.ledger.violate(problem)
    return stage.ledger, invariants


async def _begin(stage: Stage, invariants: Invariants, plan: Plan) -> None:
    """Start, and let clients of every key warm the processes up, before the first look."""
    stage.ledger.note("start")
    await stage.served.start()
    await stage.settle()
    stage.begin(stage.traffic(Random(plan.seed), 2 * plan.requests))
    # They start the processes that read large bodies, which stay.
    stage.begin(stage.large_bodies(1000))
    await stage.finish()
    await invariants.check()


async def _round(stage: Stage, invariants: Invariants, fault: Fault, rng: Random) -> None:
    ledger = stage.ledger
    ledger.begin_round(fault.name)
    stage.allowed = fault.allowed
    try:
        stage.begin(stage.traffic(rng, stage.requests))
        await fault.act(stage, rng)
        await stage.finish()
        await stage.settle()
        await invariants.check()
    except NotServingError as error:
        ledger.violate(str(error))
        await _recover(stage)


async def _recover(stage: Stage) -> None:
    """The run goes on with a new server, to see what else is wrong."""
    stage.served.kill()
    stage.allowed = Allowed(cut=True)
    await stage.finish()
    stage.site.write_keys()
    await stage.served.start()
    await stage.settle()


async def _end(stage: Stage) -> None:
    """The last stop is a polite one, and must leave nothing behind."""
    pids = stage.served.pids
    stage.served.send(signal.SIGTERM)
    if code := await stage.served.wait_for_end():
        stage.ledger.violate(f"the server ended with {code} after the last SIGTERM: {stage.served.last_lines(5)}")
    for pid in pids:

        async def is_gone(pid: int = pid) -> bool:
            return state_of(pid) in "XZ"

        if not await until(is_gone):
            stage.ledger.violate(f"process {pid} outlives its server")
    if stage.ledger.sent != stage.ledger.ended:
        stage.ledger.violate(f"{stage.ledger.sent} requests were sent, {stage.ledger.ended} ended")


def _line(ledger: Ledger, invariants: Invariants) -> str:
    last = invariants.samples[-1]
    sizes = f"{last.server.rss_mb:.0f} + {last.engine.rss_mb:.0f} MB"
    return (
        f"{ledger.age_s / 60.0:6.2f} min  round {ledger.round:3}  {ledger.fault:30} "
        f"{ledger.ended:5} ended  {sizes}  {len(ledger.violations)} violations"
    )
