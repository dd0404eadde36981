"""A full disk: the log cannot be written, an adapter arrives in part, and an engine may die meanwhile."""

from __future__ import annotations

import errno
import shutil
import signal
from contextlib import suppress
from random import Random

from ..ledger import Allowed
from ..served import NotServingError
from ..site import ADAPTERS
from ..stage import Stage
from .ends import LOST_WITH_ADAPTERS, signal_engine
from .fault import Ends, Fault, pause


async def fill(stage: Stage, rng: Random) -> None:
    """Open requests must not notice it."""
    disk = stage.site.disk
    disk.fill(stage.served.pids, with_files=rng.random() < 0.5)
    stage.ledger.note("the disk is full")
    try:
        await _load_in_part(stage, rng)
        await pause(rng, 0.5, 2.0)
        await stage.finish()
    finally:
        disk.release(stage.served.pids)


async def fill_and_kill(stage: Stage, rng: Random) -> None:
    """The next engine starts on a full disk or once there is room; a server that gives up must end, and say so."""
    disk = stage.site.disk
    disk.fill(stage.served.pids, with_files=True)
    try:
        await pause(rng, 0.1, 1.0)
        signal_engine(stage, signal.SIGKILL, rng)
        await pause(rng, 2.0, 5.0)
    finally:
        disk.release(stage.served.pids)
    await stage.finish()
    with suppress(NotServingError):
        await stage.served.wait_until_ready()
    if stage.served.exit_code == 0:
        stage.ledger.violate("the server gave up its engine and ended with 0")
    elif stage.served.exit_code is None and not stage.served.engines:
        stage.ledger.violate("the engine died while the disk was full, and the server stays without one")
        stage.served.kill()
    elif stage.served.exit_code is None and await _has_given_up(stage):
        stage.ledger.note("a replica stays down, as it should: the server is started again")
        stage.served.kill()


async def _has_given_up(stage: Stage) -> bool:
    """One of several replicas, while the others serve."""
    return any(replica["status"] == "down" for replica in (await stage.info())["replicas"])


async def _load_in_part(stage: Stage, rng: Random) -> None:
    """A tenant copies an adapter as far as there is room, and loads what came of it under another name."""
    adapter = rng.choice(ADAPTERS)
    source = stage.site.folder_of(adapter)
    copy = source.with_name(f"{adapter.name}-copy")
    try:
        shutil.copytree(source, copy)
    except (OSError, shutil.Error) as error:
        stage.ledger.note(f"the copy failed: {errno.errorcode.get(getattr(error, 'errno', None) or 0, error)}")
    name = copy.name
    ask = stage.load(adapter, frozenset({400, 403}), name, copy)
    if (await stage.ask(ask)).status == 200:
        await stage.ask(stage.unload(adapter, name=name))
    shutil.rmtree(copy, ignore_errors=True)


FAULTS = [
    Fault("disk full", fill),
    Fault("disk full and engine killed", fill_and_kill, Ends.SERVER, Allowed(LOST_WITH_ADAPTERS.statuses, cut=True)),
]
