"""Adapters' folders change or vanish while their adapters are loaded, served and loaded again."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

from ..ledger import Allowed
from ..site import ADAPTERS, Site, TenantAdapter
from ..stage import Stage
from .ends import signal_engine
from .fault import Ends, Fault, pause

BOMB = "([a-z0-9_.]+)+!"
Spoil = Callable[[Site, TenantAdapter, Random], None]
REFUSED = frozenset({400, 403, 404, 409})


def vanish(site: Site, adapter: TenantAdapter, _: Random) -> None:
    shutil.rmtree(site.folder_of(adapter))


def cut_short(site: Site, adapter: TenantAdapter, rng: Random) -> None:
    weights = site.weights_of(adapter)
    with weights.open("r+b") as file:
        file.truncate(rng.randrange(weights.stat().st_size))


def garble(site: Site, adapter: TenantAdapter, rng: Random) -> None:
    """In place, as a program that writes into the file does: a reader that maps the file sees it change."""
    weights = site.weights_of(adapter)
    with weights.open("r+b") as file:
        file.seek(rng.randrange(weights.stat().st_size // 2))
        file.write(rng.randbytes(4096))


def lose_config(site: Site, adapter: TenantAdapter, rng: Random) -> None:
    config = site.folder_of(adapter) / "adapter_config.json"
    if rng.random() < 0.5:
        config.unlink()
    else:
        config.write_text('{"r": 4, "lora_alpha"')


def change_places(site: Site, adapter: TenantAdapter, rng: Random) -> None:
    """The folder now holds another adapter of another rank."""
    other = rng.choice([one for one in ADAPTERS if one is not adapter])
    shutil.rmtree(site.folder_of(adapter))
    shutil.copytree(site.folder_of(other), site.folder_of(adapter))


def lead_away(site: Site, adapter: TenantAdapter, _: Random) -> None:
    """The folder is now a link to a folder outside the root."""
    folder = site.folder_of(adapter)
    shutil.rmtree(folder)
    folder.symlink_to(Path("/etc"))


def never_match(site: Site, adapter: TenantAdapter, rng: Random) -> None:
    """The config has a pattern that never ends to be matched."""
    config = site.folder_of(adapter) / "adapter_config.json"
    bomb = rng.choice([{"target_modules": BOMB}, {"rank_pattern": {BOMB: 4}}, {"alpha_pattern": {BOMB: 4}}])
    config.write_text(json.dumps(json.loads(config.read_text()) | bomb))


def swell(site: Site, adapter: TenantAdapter, rng: Random) -> None:
    """The config is endless, deep, or has a number of thousands of digits."""
    config = site.folder_of(adapter) / "adapter_config.json"
    config.write_text(rng.choice(["", "[" * 100_000, f'{{"r": {"9" * 4000}}}']))
    if not config.stat().st_size:
        with config.open("r+b") as file:
            file.truncate(2 << 30)  # of holes, which take no room


SPOILS: list[Spoil] = [vanish, cut_short, garble, lose_config, change_places, lead_away, never_match, swell]


async def spoil(stage: Stage, rng: Random) -> None:
    """Requests go on with what is loaded; a load of what is there now is refused, or serves it."""
    adapter, how = rng.choice(ADAPTERS), rng.choice(SPOILS)
    await pause(rng, 0.0, 1.0)
    stage.ledger.note(f"{how.__name__}: the folder of {adapter.name}")
    how(stage.site, adapter, rng)
    # Asked for after the change: copies to the device come from host memory, or from the folder.
    stage.begin(stage.drawn(rng, adapter.tenant) for _ in range(3))
    name = f"{adapter.name}-again"
    if (await stage.ask(stage.load(adapter, REFUSED, name))).status == 200:
        await stage.ask(stage.unload(adapter, name=name))
    await stage.finish()
    stage.site.restore(adapter)
    await _load_anew(stage, adapter)


async def spoil_and_kill(stage: Stage, rng: Random) -> None:
    """The next engine reads the folder again: the adapter comes back, or its requests are refused with a reason."""
    adapter, how = rng.choice(ADAPTERS), rng.choice(SPOILS)
    stage.ledger.note(f"{how.__name__}: the folder of {adapter.name}")
    how(stage.site, adapter, rng)
    await pause(rng, 0.0, 1.0)
    signal_engine(stage, signal.SIGKILL, rng)
    await stage.finish()
    await stage.served.wait_until_ready()
    stage.begin(stage.drawn(rng, adapter.tenant) for _ in range(2))
    await stage.finish()
    stage.site.restore(adapter)
    await _load_anew(stage, adapter)


async def _load_anew(stage: Stage, adapter: TenantAdapter) -> None:
    """Drops what came from a spoiled folder. An adapter that is not loaded cannot be unloaded."""
    await stage.ask(stage.unload(adapter, REFUSED))
    await stage.ask(stage.load(adapter))


FAULTS = [
    Fault("folder spoiled", spoil, allowed=Allowed(REFUSED)),
    Fault("folder spoiled and engine killed", spoil_and_kill, Ends.ENGINE, Allowed(REFUSED | {503})),
]
