"""Decodes that run over HTTP while something else is measured: so many answers are always under way."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx

OUTPUT_TOKENS = re.compile(r"^rota_output_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
LIMIT_S = 120.0


class Decodes:
    """Answers of `tokens` tokens, asked again as they end, by a thread of its own. They are not streamed: a client
    that reads each token would take a core of the machine that is measured."""

    def __init__(self, url: str, models: Sequence[str], count: int, tokens: int) -> None:
        self.problems: list[str] = []
        self._url, self._models, self._count, self._tokens = url, models, count, tokens
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._has_begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._askers: asyncio.Future[list[BaseException | None]] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._has_begun.wait(LIMIT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._askers is not None
        self._loop.call_soon_threadsafe(self._askers.cancel)
        self._thread.join(LIMIT_S)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=LIMIT_S, limits=limits) as client:
            self._loop = asyncio.get_running_loop()
            asked = [self._ask(client, number) for number in range(self._count)]
            self._askers = asyncio.gather(*asked, return_exceptions=True)
            self._has_begun.set()
            try:
                await self._askers
            except asyncio.CancelledError:
                return

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        model = self._models[number % len(self._models)]
        while True:
            # Of different lengths in the beginning, so that they do not all end in one step.
            tokens = max(1, self._tokens * (number + 1) // self._count)
            body = {"model": model, "prompt": [number + 1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                self.problems.append(answer.text[:200])
                await asyncio.sleep(0.1)
            number = self._count - 1


def produced(client: httpx.Client) -> float:
    """The tokens that a server has given so far."""
    return sum(float(one) for one in OUTPUT_TOKENS.findall(client.get("/metrics").raise_for_status().text))
