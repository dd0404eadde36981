from __future__ import annotations

import asyncio
from dataclasses import replace

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import CacheFlushed, EngineRestarted, Explained, Inspected, Whereabouts
from rota.core.ids import EngineId
from rota.core.messages import Explain, FlushCache, Inspect, Message
from rota.runtime.replicas.roster import joint_state
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.queries import Queries
from tests.builders import capacity

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
