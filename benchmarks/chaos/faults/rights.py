"""Keys come and go, adapters are loaded and unloaded, and calls are ended by others, all under load."""

from __future__ import annotations

import asyncio
import signal
from random import Random

from ..asks import Ask, encoded
from ..endings import Form, Kind
from ..exchange import exchange
from ..ledger import Allowed
from ..site import ADAPTERS, BASE, GUEST, OPERATOR
from ..stage import Stage
from .fault import Fault, pause, until


async def change_keys(stage: Stage, rng: Random) -> None:
    """The guest's key goes, a file that cannot be read comes, and the guest returns with another key."""
    site = stage.site
    await stage.finish()
    old = site.secrets.pop(GUEST)
    open_asks = stage.begin([_guest_ask(old, 24)])
    await pause(rng, 0.2, 0.6)
    _reload(stage, rng)
    await _expect(stage, old, is_known=False)
    await asyncio.gather(*open_asks)
    site.write_keys("this is not TOML")
    stage.served.send(signal.SIGHUP)
    await pause(rng, 0.2, 1.0)
    await stage.ask(stage.drawn(rng, "acme"))
    site.secrets[GUEST] = f"sk-chaos-guest-{rng.getrandbits(32):x}"
    _reload(stage, rng)
    await _expect(stage, site.secrets[GUEST], is_known=True)
    await _expect(stage, old, is_known=False)


def _reload(stage: Stage, rng: Random) -> None:
    stage.site.write_keys()
    if rng.random() < 0.5:  # else the server must see by itself that the file has changed
        stage.served.send(signal.SIGHUP)


def _guest_ask(secret: str, tokens: int) -> Ask:
    body = {"model": BASE, "max_tokens": tokens, "prompt": "The moon", "ignore_eos": True, "stream": True}
    # A request that came before its key went must end as any other; one that came too late is refused.
    return Ask("/v1/completions", secret, encoded(body), Form.OPENAI, may_get=frozenset({401}))


async def _expect(stage: Stage, secret: str, is_known: bool) -> None:
    async def is_so() -> bool:
        ending = await exchange(stage.served.port, Ask("/v1/models", secret))
        return (ending.kind is Kind.FINISHED) == is_known and ending.status in (200, 401)

    if not await until(is_so):
        stage.ledger.violate(f"a key that {'came' if is_known else 'went'} is not {'known' if is_known else 'refused'}")


async def load_and_unload(stage: Stage, rng: Random) -> None:
    """Several at a time, also the same name twice, under requests for it."""
    adapter = rng.choice(ADAPTERS)
    names = [f"{adapter.name}-{number}" for number in range(rng.randint(2, 4))]
    asks = [stage.load(adapter, frozenset({400}), name) for name in names * 2]
    await asyncio.gather(*stage.begin(asks))
    secret = stage.site.secrets[adapter.tenant]
    body = {"max_tokens": 8, "prompt": "The moon", "ignore_eos": True}
    for name in names:
        missing = frozenset({400, 404})
        ask = Ask("/v1/completions", secret, encoded({"model": name, **body}), Form.OPENAI, may_get=missing)
        stage.begin([ask])
    await pause(rng, 0.0, 1.0)
    await asyncio.gather(*stage.begin(stage.unload(adapter, name=name) for name in names))
    await stage.finish()


async def abort(stage: Stage, rng: Random) -> None:
    """A tenant ends one call, then all of its own; the operator ends all calls of all keys, and drops the cache."""
    asks = [stage.drawn(rng, rng.choice(["acme", "beta"]), most_tokens=48) for _ in range(rng.randint(3, 6))]
    stage.begin(asks)
    for _ in range(3):
        await pause(rng, 0.1, 0.8)
        key = rng.choice(["acme", "beta", OPERATOR])
        body = {"rid": rng.choice(asks).name} if rng.random() < 0.5 else {"abort_all": True}
        await stage.ask(Ask("/abort_request", stage.site.secrets[key], encoded(body)))
    # The engine may be in a long step, and then it does not answer in time.
    await stage.ask(Ask("/flush_cache", stage.site.secrets[OPERATOR], b"", may_get=frozenset({503})))
    await stage.finish()


FAULTS = [
    Fault("keys come and go", change_keys),
    Fault("loads and unloads", load_and_unload),
    Fault("aborts", abort, allowed=Allowed(abort=True)),
]
