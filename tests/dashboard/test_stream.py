from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing

import pytest

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.messages import Inspect
from rota.dashboard.feed import Feed
from rota.dashboard.routes import FRAME_S, Viewers
from rota.runtime.registry import Registry
from rota.runtime.service import ServicePhase, ServiceState
from tests.builders import capacity

READY = ServiceState(phase=ServicePhase.READY, capacity=capacity())


@pytest.fixture
def feed():
    return Feed(Registry("letters", ""), lambda: READY)


def moment_of(packet: bytes) -> float:
    return json.loads(packet.removeprefix(b"data: "))["now"]


def test_a_slow_reader_gets_the_newest_frame_and_none_in_between(feed):
    async def read_slowly() -> tuple[float, float]:
        async with aclosing(Viewers(feed, lambda _: None).frames(may_load=False)) as frames:
            first = moment_of(await anext(frames))
            await asyncio.sleep(4 * FRAME_S)  # time is what is tested: it reads nothing while four frames pass
            return first, moment_of(await anext(frames))

    first, second = asyncio.run(read_slowly())
    assert second - first > 3 * FRAME_S, "it is older than the pause"


def test_however_many_watch_the_engine_is_asked_once_a_frame(feed):
    asked: list[Inspect] = []
    viewers = Viewers(feed, asked.append)

    async def watch() -> None:
        async with aclosing(viewers.frames(may_load=False)) as frames:
            for _ in range(3):
                await anext(frames)

    async def watch_together() -> None:
        await asyncio.gather(*(watch() for _ in range(20)))

    asyncio.run(watch_together())
    assert 3 <= len(asked) < 20, "twenty would ask sixty times"
    assert viewers.count == 0


def test_an_engine_that_cannot_be_asked_ends_no_stream(feed):
    def refuse(_: Inspect) -> None:
        raise RequestError(Fault(FaultCode.ENGINE_DIED, "It is down."))

    async def read() -> bytes:
        async with aclosing(Viewers(feed, refuse).frames(may_load=False)) as frames:
            return await anext(frames)

    assert moment_of(asyncio.run(read())) <= time.monotonic()
