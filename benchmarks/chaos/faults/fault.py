"""A fault is one thing that goes wrong; every number in it is drawn from the source of its round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from random import Random

from ..ledger import NOTHING_ELSE, Allowed
from ..stage import Stage

TIMEOUT_S = 120.0
_LOOK_S = 0.05


class Ends(IntEnum):
    """Which processes a fault ends. The last part of a run spares them, so that their memory can be compared."""

    NOTHING = 0
    ENGINE = 1
    SERVER = 2


Act = Callable[[Stage, Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`act` returns when the fault is over; ordinary requests go on beside it."""

    name: str
    act: Act
    ends: Ends = Ends.NOTHING
    allowed: Allowed = NOTHING_ELSE


async def pause(rng: Random, low_s: float, high_s: float) -> None:
    """Time is what a fault is made of."""
    await asyncio.sleep(rng.uniform(low_s, high_s))


async def until(is_so: Callable[[], Awaitable[bool]], within_s: float = TIMEOUT_S) -> bool:
    """Whether something comes true in time."""
    ends_at = time.monotonic() + within_s
    while not await is_so():
        if time.monotonic() > ends_at:
            return False
        await asyncio.sleep(_LOOK_S)
    return True
