"""Adapters of sources are located in threads of their own: a slow source must not take the threads of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from rota.core.lora_paths import LoraPath
from rota.sources.locator import Locator

# Gives an adapter that is asked for the address of what lies there now. Raises AdapterError.
Locate = Callable[[LoraPath], Awaitable[LoraPath]]

THREADS = 8


async def as_asked(asked: LoraPath) -> LoraPath:
    """For a server without sources."""
    return asked


class Locating:
    """For the event loop, which does not wait: it hears of the address in its time."""

    def __init__(self, locator: Locator) -> None:
        self._locator = locator
        self._pool = ThreadPoolExecutor(THREADS, "adapter-listing")

    async def __call__(self, asked: LoraPath) -> LoraPath:
        if not self._locator.may_be_far(asked):
            return asked
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._locator.locate, asked)
