"""Faults that end or stop a process: the engine's or the server's."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from random import Random

from ..ledger import Allowed
from ..processes import state_of, workers_of
from ..served import SILENCE_S
from ..stage import Stage
from .fault import Ends, Fault, pause, until

# After five quick deaths a server gives up; it may try a few times more than a fault needs.
_MOST_KILLS = 12
# An adapter that a new engine still reads is not served yet, and one that it cannot read is gone.
LOST_WITH_ADAPTERS = Allowed(statuses=frozenset({400, 404, 503}))
GONE = Allowed(statuses=frozenset({503}), cut=True)


def signal_engine(stage: Stage, number: signal.Signals, rng: Random) -> int | None:
    """Returns the engine's process; None if there is none at this moment. Of several engines any may be meant."""
    engines = stage.served.engines
    return _signal(stage, number, rng.choice(engines)) if engines else None


def _signal(stage: Stage, number: signal.Signals, engine: int) -> int:
    stage.ledger.note(f"{number.name} to an engine, {engine}")
    with suppress(ProcessLookupError):
        os.kill(engine, number)
    return engine


async def kill_engine(stage: Stage, rng: Random) -> None:
    times = rng.choice([1, 1, 2])
    for _ in range(times):
        await pause(rng, 0.1, 2.0)
        signal_engine(stage, signal.SIGKILL, rng)


async def stop_engine(stage: Stage, rng: Random) -> None:
    """For a moment, or for good: then the server must find that the engine hangs, and replace it."""
    await pause(rng, 0.1, 1.5)
    engine = signal_engine(stage, signal.SIGSTOP, rng)
    if engine is None:
        return
    if rng.random() < 0.3:
        await pause(rng, 0.2, 0.5 * SILENCE_S)
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
        return

    async def is_replaced() -> bool:
        return state_of(engine) in "XZ"

    if not await until(is_replaced):
        stage.ledger.violate(f"the engine was stopped for {SILENCE_S:g} seconds and more, and was not replaced")
        os.kill(engine, signal.SIGKILL)


async def kill_worker(stage: Stage, rng: Random) -> None:
    """A process that reads a large body dies, in the middle of it or while it waits for the next."""
    stage.begin(stage.large_bodies(rng.randint(1_000, 10_000), frozenset({503})))
    await pause(rng, 0.0, 1.0)
    for worker in workers_of(stage.served.pid)[: rng.randint(1, 2)]:
        stage.ledger.note(f"SIGKILL to a worker, {worker}")
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    stage.begin(stage.large_bodies(1_000, frozenset({503})))
    await stage.finish()


async def kill_server(stage: Stage, rng: Random) -> None:
    await pause(rng, 0.0, 2.0)
    engines = stage.served.engines
    stage.ledger.note("SIGKILL to the server")
    stage.served.kill()
    await stage.finish()

    async def is_gone() -> bool:
        return all(state_of(engine) in "XZ" for engine in engines)

    if not await until(is_gone):
        stage.ledger.violate(f"an engine of {engines} outlives its server")
    await stage.served.start()


async def stop_server(stage: Stage, rng: Random) -> None:
    await pause(rng, 0.0, 2.0)
    stage.ledger.note("SIGTERM to the server")
    stage.served.send(signal.SIGTERM)
    if rng.random() < 0.3:
        await pause(rng, 0.1, 1.0)
        stage.served.send(signal.SIGTERM)
    code = await stage.served.wait_for_end()
    if code:
        stage.ledger.violate(f"the server ended with {code} after SIGTERM: {stage.served.last_lines(5)}")
    await stage.finish()
    await stage.served.start()


async def exhaust_engine(stage: Stage, _: Random) -> None:
    """Engines that die again and again soon after their start: the server must end by itself, and say so."""
    await stage.finish()
    killed: set[int] = set()

    async def has_ended() -> bool:
        for engine in stage.served.engines:
            if engine not in killed and len(killed) < _MOST_KILLS * stage.served.replicas:
                killed.add(_signal(stage, signal.SIGKILL, engine))
        return stage.served.exit_code is not None

    if not await until(has_ended):
        stage.ledger.violate(f"engines died {len(killed)} times, and the server goes on without any")
        stage.served.kill()
    elif stage.served.exit_code in (0, None):
        stage.ledger.violate("the server gave up its engine and ended with 0")
    await stage.served.start()


FAULTS = [
    Fault("engine killed", kill_engine, Ends.ENGINE, LOST_WITH_ADAPTERS),
    Fault("engine stopped", stop_engine, Ends.ENGINE, LOST_WITH_ADAPTERS),
    Fault("engine dies at every start", exhaust_engine, Ends.SERVER, GONE),
    Fault("text worker killed", kill_worker),
    Fault("server killed", kill_server, Ends.SERVER, GONE),
    Fault("server stopped", stop_server, Ends.SERVER, GONE),
]
