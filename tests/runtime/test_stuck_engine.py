"""An engine that fails and cannot end, lives and says nothing, or makes no step keeps no request waiting."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rota.core.adapter import Adapter
from rota.core.config import EngineConfig
from rota.core.events import AdapterAdded, EngineRestarted, FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched, Message
from rota.core.plan import StepPlan, StepResult
from rota.core.standstill import StoodStill
from rota.policy.slot_policies import SLOT_POLICIES
from rota.runtime.service import ServicePhase
from rota.runtime.timeouts import EngineTimeouts
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice, FakeTicket
from tests.policy.never_admits import NEVER, NeverAdmits
from tests.processes import is_alive
from tests.runtime.services import LONG, SLOW, supervised
from tests.runtime.test_supervisor import parent_in
from tests.waiting import hang, line_of, until


class FailingDevice(FakeDevice):
    """Fails at its first step while a thread of its own still reads from a disk that does not answer."""

    def submit(self, plan: StepPlan) -> FakeTicket:
        ThreadPoolExecutor(1).submit(hang)
        raise ZeroDivisionError("a kernel went wrong")


class UndeadDevice(FakeDevice):
    """Fails likewise, in a process that does not end by itself."""

    def submit(self, plan: StepPlan) -> FakeTicket:
        os._exit = lambda _: hang()  # type: ignore[assignment, return-value]
        raise ZeroDivisionError("a kernel went wrong")


class HangingDevice(FakeDevice):
    """Never starts the prompt "hangs", and never ends a step of the prompt "never-ends"."""

    is_stuck = False

    def submit(self, plan: StepPlan) -> FakeTicket:
        if any(seat.request_id == "hangs" for seat in plan.seats):
            hang()
        type(self).is_stuck = self.is_stuck or any(seat.request_id == "never-ends" for seat in plan.seats)
        return super().submit(plan)

    def collect(self, ticket: FakeTicket) -> StepResult:
        if self.is_stuck:
            hang()
        return super().collect(ticket)


class SlowDisk(FakeDevice):
    """A thread reads adapters, and each takes four seconds."""

    def fetch(self, adapter: Adapter) -> Message:
        threading.Timer(4.0, self.report, [adapter]).start()
        return super().fetch(adapter)

    def report(self, adapter: Adapter) -> None:
        assert self._post is not None
        self._post(AdapterFetched(adapter_id=adapter.adapter_id, at=self.now()))

    def submit(self, plan: StepPlan) -> FakeTicket:
        post, self._post = self._post, lambda message: None if isinstance(message, AdapterFetched) else post(message)
        ticket = super().submit(plan)
        self._post = post
        return ticket


def test_a_failed_engine_does_not_wait_for_its_threads():
    with supervised(FailingDevice) as (service, listener):
        service.send(submit("a"))

        assert "a kernel went wrong" in listener.wait_for_ending("a").fault.message


def test_a_failed_engine_that_does_not_end_is_killed():
    with supervised(UndeadDevice) as (service, listener):
        service.send(submit("a"))

        assert "a kernel went wrong" in listener.wait_for_ending("a").fault.message


@pytest.mark.parametrize("how", ["hangs", "never-ends"])
def test_an_engine_whose_step_does_not_end_is_started_again(how):
    with supervised(HangingDevice, EngineTimeouts(silence_s=3.0)) as (service, listener):
        service.wait_until_ready()
        # Time is what is tested: an engine without work says that it is alive, for longer than the limit.
        time.sleep(3.5)
        first = service.engine_pid
        service.send(submit("before"))
        assert listener.wait_for_ending("before").reason is FinishReason.LENGTH
        assert service.engine_pid == first

        service.send(submit(how))
        message = listener.wait_for_ending(how).fault.message
        assert "said nothing for 3 seconds" in message
        assert "please send it again" in message
        service.send(submit("after"))
        assert listener.wait_for_ending("after").reason is FinishReason.LENGTH
        assert service.engine_pid != first


@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
def test_an_engine_that_is_stopped_is_started_again(is_idle, caplog):
    with supervised(SLOW, EngineTimeouts(silence_s=2.0)) as (service, listener):
        service.wait_until_ready()
        first = service.engine_pid
        if not is_idle:
            service.send(submit("open", max_new_tokens=LONG))
            listener.wait_for_tokens("open")
        os.kill(first, signal.SIGSTOP)

        assert until(lambda: service.state.phase is ServicePhase.STARTING), "the hang was not found"
        assert service.state.capacity is None
        if not is_idle:
            assert "The engine hung" in listener.wait_for_ending("open").fault.message
        assert until(lambda: service.state.phase is ServicePhase.READY), "no other engine came"
        assert (service.engine_pid != first, is_alive(first)) == (True, False)
        [restart] = [event for event in listener.events if isinstance(event, EngineRestarted)]
        assert "The engine hung" in restart.reason
        assert service.state.engine_pid == service.engine_pid
    assert "The engine serves again." in [record.getMessage() for record in caplog.records]


def test_an_engine_that_once_stood_still_is_found_as_soon_as_any_other():
    with supervised(SLOW, EngineTimeouts(silence_s=4.0)) as (service, listener):
        service.wait_until_ready()
        service.send(submit("open", max_new_tokens=LONG))
        listener.wait_for_tokens("open")
        os.kill(service.engine_pid, signal.SIGSTOP)
        time.sleep(2.0)  # time is what is tested
        os.kill(service.engine_pid, signal.SIGCONT)
        service.send(submit("again"))
        listener.wait_for_ending("again")
        os.kill(service.engine_pid, signal.SIGSTOP)

        assert "it said nothing for 4 seconds" in listener.wait_for_ending("open").fault.message


def test_an_engine_that_waits_for_a_slow_disk_has_not_hung():
    with supervised(SlowDisk, EngineTimeouts(silence_s=3.0)) as (service, listener):
        service.wait_until_ready()
        first = service.engine_pid
        message = add_adapter(1)
        service.send(message)
        service.send(submit("waits", adapter=message.adapter.adapter_id))

        listener.wait_for_adapter(1, AdapterAdded)
        assert listener.wait_for_ending("waits").reason is FinishReason.LENGTH
        assert service.engine_pid == first


def frozen() -> FakeDevice:
    """Runs in the engine's process, before its scheduler is made."""
    SLOT_POLICIES[NEVER.lora_policy] = NeverAdmits.from_config
    return FakeDevice()


def test_an_engine_whose_policy_lets_nobody_start_is_started_again():
    config = EngineConfig(policy=NEVER, standstill_s=0.1)
    with supervised(frozen, config=config) as (service, listener):
        service.send(add_adapter(1))
        listener.wait_for_adapter(1, AdapterAdded)
        first = service.engine_pid
        service.send(submit("base"))
        listener.wait_for_ending("base")
        service.send(submit("frozen", adapter=AdapterId(1)))

        message = listener.wait_for_ending("frozen").fault.message
        assert "while 1 request waits and nothing they wait for is under way. It is being started again" in message
        assert [event.is_stuck for event in listener.events if isinstance(event, StoodStill)][-1]
        service.send(submit("again"))
        assert listener.wait_for_ending("again").reason is FinishReason.LENGTH
        assert (service.engine_pid != first, service.state.standstill) == (True, None)


def test_an_engine_that_hangs_at_its_first_step_every_time_stays_down_in_the_end():
    timeouts = EngineTimeouts(silence_s=1.0, quick_death_s=0.0, quick_deaths=2, pause_s=0.01)
    with supervised(HangingDevice, timeouts) as (service, listener):
        for number in range(2):
            service.send(submit("hangs"))
            assert until(lambda count=number: len(restarts(listener.events)) > count or is_down(service))
        assert until(lambda: is_down(service)), "it is started again and again"
        assert "died 2 times in a row" in service.state.reason


def restarts(events: list[object]) -> list[object]:
    return [event for event in events if isinstance(event, EngineRestarted)]


def is_down(service: object) -> bool:
    return service.state.phase is ServicePhase.DOWN


def test_a_frozen_machine_does_not_count_as_a_hang(tmp_path):
    """Server and engine are stopped for longer than the limit, as a paused container is."""
    with parent_in(tmp_path, "impatient") as parent:
        first = line_of(parent)
        os.killpg(parent.pid, signal.SIGSTOP)
        time.sleep(5.0)  # time is what is tested
        os.killpg(parent.pid, signal.SIGCONT)

        assert line_of(parent) == first
