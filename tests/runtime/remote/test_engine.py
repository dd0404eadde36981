"""An engine elsewhere serves, dies, hangs, stops and is started again like one in a process of this machine."""

from __future__ import annotations

import os
import signal

import pytest

from rota.core.errors import EngineDiedError, FaultCode, ModelError
from rota.core.events import AdapterAdded, EngineRestarted, FinishReason
from rota.runtime.service import ServicePhase
from rota.runtime.timeouts import EngineTimeouts
from tests.builders import abort, add_adapter, submit
from tests.fakes import FakeDevice, continuation, outputs
from tests.processes import is_alive
from tests.runtime.remote.elsewhere import Elsewheres
from tests.runtime.services import LONG, SLOW, supervised
from tests.waiting import until


def test_messages_wait_until_the_engine_has_joined_and_requests_end():
    with supervised(FakeDevice, new_engine=Elsewheres().new_engine) as (service, listener):
        early = submit("early", max_new_tokens=5)
        service.send(early)
        assert service.engine_pid is None  # it has not joined yet

        assert listener.wait_for_ending("early").reason is FinishReason.LENGTH
        assert outputs(listener.events)["early"] == continuation(early.prompt, 5)
        assert service.state.engine_pid == service.engine_pid
        assert is_alive(service.engine_pid)


def test_a_killed_engine_fails_its_requests_and_the_next_one_knows_the_adapters():
    with supervised(SLOW, new_engine=Elsewheres().new_engine) as (service, listener):
        adapter = add_adapter(1)
        service.send(adapter)
        listener.wait_for_adapter(1, AdapterAdded)
        service.send(submit("lost", max_new_tokens=LONG))
        listener.wait_for_tokens("lost")
        pid = service.engine_pid
        os.kill(pid, signal.SIGKILL)

        ending = listener.wait_for_ending("lost")
        assert (ending.reason, ending.fault.code) == (FinishReason.FAILED, FaultCode.ENGINE_DIED)
        assert "killed by SIGKILL" in ending.fault.message
        again = submit("again", max_new_tokens=5, adapter=adapter.adapter.adapter_id)
        service.send(again)
        assert listener.wait_for_ending("again").reason is FinishReason.LENGTH
        assert outputs(listener.events)["again"] == continuation(again.prompt, 5)
        assert service.engine_pid != pid


def test_the_reason_of_a_death_is_what_whoever_started_the_engine_knows():
    elsewheres = Elsewheres(ending="The machine 10.0.0.7 is gone.")
    with supervised(SLOW, new_engine=elsewheres.new_engine) as (service, listener):
        service.send(submit("lost", max_new_tokens=LONG))
        listener.wait_for_tokens("lost")
        elsewheres.all[0].kill()

        assert listener.wait_for_ending("lost").fault.message.startswith("The machine 10.0.0.7 is gone. ")
        [restart] = [event for event in listener.events if isinstance(event, EngineRestarted)]
        assert restart.reason == "The machine 10.0.0.7 is gone."


def test_an_engine_ends_with_the_process_that_started_it():
    elsewheres = Elsewheres()
    with supervised(SLOW, new_engine=elsewheres.new_engine) as (service, _):
        service.wait_until_ready()
        pid = service.engine_pid
        elsewheres.all[0].kill()

        assert until(lambda: not is_alive(pid)), "the engine has outlived its parent"


def no_such_model() -> FakeDevice:
    raise ModelError("There is no model in /nowhere.")


def test_last_words_of_a_start_arrive():
    with supervised(no_such_model, new_engine=Elsewheres(ending="It is gone.").new_engine) as (service, listener):
        service.send(submit("early"))

        with pytest.raises(EngineDiedError, match=r"^There is no model in /nowhere\.$"):
            service.wait_until_ready()
        assert "/nowhere" in listener.wait_for_ending("early").fault.message


def test_an_engine_that_says_nothing_is_killed_and_started_again():
    with supervised(SLOW, EngineTimeouts(silence_s=2.0), Elsewheres().new_engine) as (service, listener):
        service.send(submit("open", max_new_tokens=LONG))
        listener.wait_for_tokens("open")
        first = service.engine_pid
        os.kill(first, signal.SIGSTOP)

        assert "said nothing for 2 seconds" in listener.wait_for_ending("open").fault.message
        service.send(submit("after"))
        assert listener.wait_for_ending("after").reason is FinishReason.LENGTH
        assert (service.engine_pid != first, is_alive(first)) == (True, False)


def test_stopping_aborts_whoever_is_open_and_leaves_no_process():
    elsewheres = Elsewheres()
    with supervised(SLOW, new_engine=elsewheres.new_engine) as (service, listener):
        for name in "ab":
            service.send(submit(name, max_new_tokens=LONG))
            listener.wait_for_tokens(name)
        service.send(abort("b"))
        assert listener.wait_for_ending("b").reason is FinishReason.ABORT
        pid = service.engine_pid
        service.stop()

        assert listener.wait_for_ending("a", timeout_s=0.0).reason is FinishReason.ABORT
        assert not is_alive(pid)
        assert elsewheres.all[0].exitcode == 0  # it was asked to stop, not killed
        assert service.state.phase is ServicePhase.DOWN


def test_a_start_can_be_stopped_before_the_engine_has_joined():
    elsewheres = Elsewheres()
    with supervised(SLOW, new_engine=elsewheres.new_engine) as (service, _):
        service.stop()

        assert service.state.phase is ServicePhase.DOWN
        assert len(elsewheres.all) == 1
