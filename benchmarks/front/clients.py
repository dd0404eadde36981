"""Clients that look at the clock: how old is each token when it arrives, and how soon does the first one come."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import aiohttp
import msgspec

from front.serving import Served
from front.ticks import TickReader
from rota.bench.client import DONE, EventReader
from rota.bench.questions import random_text
from rota.runtime.children import freeze_heap


class _Choice(msgspec.Struct):
    text: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice]


_DECODE = msgspec.json.Decoder(_Event).decode


class Window:
    """The ages of the tokens that came within some seconds, and the memory in use at their end."""

    def __init__(self) -> None:
        self.ages = array("d")
        self.rss_mb: dict[str, float] = {}


async def token_ages(
    served: Served, ticks: TickReader, streams: int, answer_tokens: int, duration_s: float, window_s: float
) -> list[Window]:
    """Keep so many streams open for so long; the first windows hold the rush of everybody's start.

    First answers are of all lengths, so that streams do not end and begin all at once for ever after.
    """
    freeze_heap()
    windows = [Window()]
    ends_at = time.monotonic() + duration_s

    async def follow(session: aiohttp.ClientSession, number: int) -> None:
        dice = random.Random(number)
        length = max(1, answer_tokens * (number + 1) // streams)
        while time.monotonic() < ends_at:
            body, length = _body(random_text(dice, 16), length), answer_tokens
            async with session.post(f"{served.url}/v1/completions", data=body) as response:
                response.raise_for_status()
                events = EventReader()
                async for data in response.content.iter_any():
                    at = time.monotonic()
                    words = _words(events.feed(data))
                    windows[-1].ages.extend(ticks.age_s(word, at) for word in words)
                    if at > ends_at:
                        return

    async def turn_windows() -> None:
        while time.monotonic() < ends_at:
            await asyncio.sleep(window_s)
            windows[-1].rss_mb = served.rss_mb()
            windows.append(Window())

    async with _session() as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(turn_windows())
        for number in range(streams):
            tasks.create_task(follow(session, number))
    return [window for window in windows if window.rss_mb]


async def first_tokens(served: Served, prompt_tokens: int, requests: int) -> list[float]:
    """Seconds to the first token of one request after the other, with a device that takes no time."""
    taken = []
    async with _session() as session:
        for number in range(requests):
            body = _body(random_text(random.Random(f"first {number}"), prompt_tokens), 2)
            asked_at = time.monotonic()
            async with session.post(f"{served.url}/v1/completions", data=body) as response:
                response.raise_for_status()
                await response.content.readany()
                taken.append(time.monotonic() - asked_at)
                await response.read()
    return taken


def _words(payloads: Iterable[bytes]) -> Iterator[str]:
    for payload in payloads:
        if payload != DONE:
            for choice in _DECODE(payload).choices:
                yield from choice.text.split()


def _body(prompt: str, tokens: int) -> bytes:
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "stream": True}
    return msgspec.json.encode({**fields, "ignore_eos": True})


def _session() -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=None)
    )
