"""An engine that fails and cannot end, or lives and says nothing, keeps nobody waiting."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from rota.core.events import FinishReason
from rota.core.plan import StepPlan
from rota.runtime.process import Patience
from tests.builders import submit
from tests.fakes import FakeDevice, FakeTicket
from tests.runtime.services import supervised
from tests.waiting import hang


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
    """Computes its first prompt for ever; any other process of it does as it should."""

    def submit(self, plan: StepPlan) -> FakeTicket:
        if any(seat.request_id == "hangs" for seat in plan.seats):
            hang()
        return super().submit(plan)


def test_a_failed_engine_does_not_wait_for_its_threads():
    with supervised(FailingDevice) as (service, listener):
        service.send(submit("a"))

        assert "a kernel went wrong" in listener.wait_for_ending("a").fault.message


def test_a_failed_engine_that_does_not_end_is_killed():
    with supervised(UndeadDevice) as (service, listener):
        service.send(submit("a"))

        assert "a kernel went wrong" in listener.wait_for_ending("a").fault.message


def test_an_engine_that_says_nothing_while_it_owes_an_answer_is_started_again():
    with supervised(HangingDevice, Patience(silence_s=2.0)) as (service, listener):
        service.wait_until_ready()
        # Time is what is tested: no request is open, so a silence longer than the limit is no fault.
        time.sleep(2.5)
        first = service.engine_pid
        service.send(submit("before"))
        assert listener.wait_for_ending("before").reason is FinishReason.LENGTH
        assert service.engine_pid == first

        service.send(submit("hangs"))
        assert "said nothing for 2 seconds" in listener.wait_for_ending("hangs").fault.message
        service.send(submit("after"))
        assert listener.wait_for_ending("after").reason is FinishReason.LENGTH
        assert service.engine_pid != first
