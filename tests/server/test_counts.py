from __future__ import annotations

import asyncio
import time

import pytest

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import AdapterStanding, EngineRestarted, Inspected
from rota.core.ids import BASE, EngineId
from rota.core.messages import Message
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.queries import FRESH_S, Queries
from tests.builders import capacity
from tests.waiting import TIMEOUT_S

# An answer of then stays fresh, however slow the machine is.
LATER_S = 3600.0
NOTHING = AdapterStanding(adapter_id=BASE, waiting=0, running=0, parked=0, oldest_at=None, reason="")


class Engine:
    """A service that notes what it is asked and answers when it is told to."""

    def __init__(self) -> None:
        self.state = ServiceState(phase=ServicePhase.READY, capacity=capacity())
        self.sent: list[Message] = []
        self.is_gone = False

    def send(self, message: Message) -> None:
        if self.is_gone:
            raise RequestError(Fault(FaultCode.ENGINE_DIED, "It is gone."))
        self.sent.append(message)


def answer(at: float, steps: int = 1) -> Inspected:
    return Inspected(at=at, steps=steps, rows=0, blocks=1, blocks_used=0, slots=1, adapters=(), others=NOTHING)


async def asked(queries: Queries, steps: int) -> dict[EngineId, Inspected]:
    """A scrape that the engine answers at once."""
    scrape = asyncio.create_task(queries.count(()))
    await asyncio.sleep(0)
    queries.observe([answer(time.monotonic() + LATER_S, steps)])
    return await scrape


def test_while_a_step_runs_a_scraper_gets_the_last_numbers_and_questions_do_not_pile_up():
    async def act() -> None:
        engine = Engine()
        queries = Queries(engine, timeout_s=60.0)
        assert (await asked(queries, steps=1))[EngineId(0)].steps == 1
        for _ in range(3):
            assert (await queries.count(()))[EngineId(0)].steps == 1
        assert len(engine.sent) == 2, "the second is open"
        queries.observe([answer(time.monotonic() + LATER_S, steps=2)])
        assert (await asked(queries, steps=3))[EngineId(0)].steps == 3

    asyncio.run(act())


def test_numbers_that_are_too_old_are_left_out():
    async def act() -> None:
        queries = Queries(Engine(), timeout_s=0.01)
        queries.observe([answer(time.monotonic() - FRESH_S - 1.0)])

        assert await queries.count(()) == {}

    asyncio.run(act())


def test_an_engine_that_died_with_the_question_is_not_waited_for():
    async def act() -> None:
        queries = Queries(Engine(), timeout_s=60.0)
        scrape = asyncio.create_task(queries.count(()))
        await asyncio.sleep(0)
        queries.observe([EngineRestarted(at=time.monotonic(), reason="It died.")])

        assert await asyncio.wait_for(scrape, TIMEOUT_S) == {}

    asyncio.run(act())


@pytest.mark.parametrize("is_up", [True, False])
def test_without_an_engine_there_are_no_numbers_and_no_wait(is_up):
    async def act() -> None:
        engine = Engine()
        engine.is_gone = True
        if not is_up:
            engine.state = ServiceState(phase=ServicePhase.STARTING)
        queries = Queries(engine, timeout_s=60.0)
        for _ in range(2):
            assert await asyncio.wait_for(queries.count(()), TIMEOUT_S) == {}

    asyncio.run(act())


def test_a_whole_inspection_for_another_reader_is_no_answer():
    async def act() -> None:
        queries = Queries(Engine(), timeout_s=0.01)
        scrape = asyncio.create_task(queries.count(()))
        await asyncio.sleep(0)
        whole = Inspected(at=time.monotonic(), steps=1, rows=0, blocks=1, blocks_used=0, slots=1, adapters=())
        queries.observe([whole])

        assert await scrape == {}

    asyncio.run(act())
