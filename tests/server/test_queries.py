"""Questions to engines: each gets its own answer in time, or the last one, and questions do not pile up."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import AdapterStanding, CacheFlushed, EngineRestarted, Explained, Inspected, Whereabouts
from rota.core.ids import BASE, EngineId
from rota.core.messages import Explain, FlushCache, Inspect, Message
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.queries import FRESH_S, Queries
from tests.builders import capacity
from tests.waiting import TIMEOUT_S

STANDING = Inspected(at=1.0, steps=1, rows=0, blocks=8, blocks_used=0, slots=2, adapters=())


class FakeService:
    """Keeps what it is sent, and answers nothing."""

    def __init__(self, phase: ServicePhase = ServicePhase.READY, is_broken: bool = False) -> None:
        self.state = ServiceState(phase=phase, capacity=capacity() if phase is ServicePhase.READY else None)
        self.sent: list[Message] = []
        self._is_broken = is_broken

    def send(self, message: Message) -> None:
        if self._is_broken:
            raise RequestError(Fault(FaultCode.ENGINE_DIED, "It went down just now."))
        self.sent.append(message)


def test_each_question_gets_its_own_answer():
    async def ask():
        service = FakeService()
        queries = Queries(service)
        asked = asyncio.gather(queries.explain("a"), queries.explain("b"), queries.inspect(), queries.flush_cache())
        await asyncio.sleep(0)
        kinds = [type(message) for message in service.sent]
        explained = [Explained(request_id=id, at=1.0, state=Whereabouts.RUNNING) for id in ("b", "a")]
        queries.observe([STANDING, *explained, CacheFlushed(1.0, 3)])
        return kinds, await asked

    kinds, (a, b, standing, flushed) = asyncio.run(ask())
    assert kinds == [Explain, Explain, Inspect, FlushCache]
    assert (a.request_id, b.request_id) == ("a", "b")
    assert standing == (STANDING,)
    assert flushed.blocks == 3


def test_those_who_ask_the_same_at_the_same_time_ask_once():
    async def ask():
        service = FakeService()
        queries = Queries(service)
        asked = asyncio.gather(queries.inspect(), queries.inspect())
        await asyncio.sleep(0)
        queries.observe([STANDING])
        return service.sent, await asked

    sent, answers = asyncio.run(ask())
    assert len(sent) == 1
    assert answers == [(STANDING,), (STANDING,)]


def test_an_engine_that_does_not_answer_in_time_is_asked_anew_the_next_time():
    async def ask():
        service = FakeService()
        queries = Queries(service, timeout_s=0.01)
        answers = [await queries.inspect(), await queries.inspect()]
        queries.observe([STANDING])  # too late, and harmless
        return service.sent, answers

    sent, answers = asyncio.run(ask())
    assert answers == [(), ()]
    assert len(sent) == 2


def test_during_a_long_step_the_last_answer_is_recalled_also_one_that_came_late():
    async def ask():
        service = FakeService()
        queries = Queries(service, timeout_s=0.01)
        assert await queries.inspect() == ()
        queries.observe([STANDING])  # too late for whoever asked
        return await queries.inspect(), await queries.inspect_or_recall()

    assert asyncio.run(ask()) == ((), (STANDING,))


def test_before_the_first_answer_a_long_step_is_waited_for():
    async def ask():
        service = FakeService()
        queries = Queries(service, timeout_s=0.01)
        asked = asyncio.create_task(queries.inspect_or_recall())
        while len(service.sent) < 3:  # it has been patient twice, in vain
            await asyncio.sleep(0)
        queries.observe([STANDING])
        return await asked

    assert asyncio.run(ask()) == (STANDING,)


def test_what_a_dead_engine_told_is_not_recalled():
    async def ask(is_replaced: bool):
        service = FakeService()
        queries = Queries(service, timeout_s=0.001)
        queries.observe([STANDING])
        if is_replaced:
            queries.observe([EngineRestarted(at=2.0, reason="It died.")])
        else:
            service.state = ServiceState(phase=ServicePhase.DOWN)
        return await queries.inspect_or_recall()

    assert asyncio.run(ask(is_replaced=True)) == ()
    assert asyncio.run(ask(is_replaced=False)) == ()


def of_engine(number: int) -> Inspected:
    return replace(STANDING, engine_id=EngineId(number))


def both() -> FakeService:
    from rota.runtime.replicas.roster import joint_state  # an extension: not every run of these tests has it

    service = FakeService()
    service.state = joint_state([service.state] * 2)
    return service


def test_each_engine_answers_and_the_last_answer_ends_the_wait():
    async def ask():
        queries = Queries(both(), timeout_s=60.0)
        asked = asyncio.gather(queries.inspect(), queries.flush_cache())
        await asyncio.sleep(0)
        queries.observe([of_engine(1), CacheFlushed(1.0, 3, EngineId(1)), CacheFlushed(1.0, 4, EngineId(0))])
        queries.observe([of_engine(0)])
        return await asked

    inspected, flushed = asyncio.run(ask())
    assert inspected == (of_engine(0), of_engine(1))
    assert flushed.blocks == 7


def test_an_engine_that_dies_or_is_in_a_long_step_does_not_keep_the_answer_of_the_other_back():
    async def ask(does_die: bool):
        queries = Queries(both(), timeout_s=60.0 if does_die else 0.01)
        asked = asyncio.gather(queries.inspect(), queries.flush_cache())
        await asyncio.sleep(0)
        queries.observe([of_engine(1), CacheFlushed(1.0, 3, EngineId(1))])
        if does_die:
            queries.observe([EngineRestarted(at=2.0, reason="It died.", engine_id=EngineId(0))])
        return await asked

    assert asyncio.run(ask(does_die=True))[0] == (of_engine(1),)
    assert asyncio.run(ask(does_die=False)) == [(of_engine(1),), None], "one cache may still be as it was"


def test_of_an_engine_in_a_long_step_the_last_answer_is_recalled_beside_the_new_one_of_the_other():
    async def ask():
        queries = Queries(both(), timeout_s=0.01)
        queries.observe([of_engine(0)])
        asked = asyncio.create_task(queries.inspect_or_recall())
        await asyncio.sleep(0)
        queries.observe([replace(of_engine(1), steps=9)])
        return await asked

    assert [(one.engine_id, one.steps) for one in asyncio.run(ask())] == [(0, 1), (1, 9)]


def test_an_engine_that_is_not_there_is_not_waited_for():
    async def ask(service: FakeService):
        return await Queries(service, timeout_s=60.0).inspect()

    assert asyncio.run(ask(FakeService(ServicePhase.STARTING))) == ()
    assert asyncio.run(ask(FakeService(ServicePhase.DOWN))) == ()
    assert asyncio.run(ask(FakeService(is_broken=True))) == ()


# ── counts alone ──────────────────────────────────────────────────────────────────────────────────────────────────────

# An answer of then stays fresh, however slow the machine is.
LATER_S = 3600.0
BASE_ALONE = AdapterStanding(adapter_id=BASE, waiting=0, running=0, parked=0, oldest_at=None, reason="")


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
    return Inspected(at=at, steps=steps, rows=0, blocks=1, blocks_used=0, slots=1, adapters=(), others=BASE_ALONE)


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
