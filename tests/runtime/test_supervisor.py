from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rota.core.adapter import Adapter
from rota.core.errors import EngineDiedError, FaultCode, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, EngineRestarted, FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, Message, RemoveAdapter
from rota.core.plan import StepPlan
from rota.core.stages import Stage
from rota.runtime.service import ServicePhase
from rota.runtime.supervisor import SupervisedService
from rota.runtime.timeouts import EngineTimeouts, Silence
from rota.start import START
from tests.builders import abort, add_adapter, submit
from tests.fakes import FakeDevice, FakeTicket, continuation, no_such_model, outputs
from tests.processes import Program, is_alive, started
from tests.runtime.services import LONG, SLOW, Listener, supervised
from tests.waiting import TIMEOUT_S, hang, line_of, until


def test_a_killed_engine_fails_the_open_requests_at_once_and_the_next_request_succeeds():
    with supervised(SLOW) as (service, listener):
        for name in "ab":
            service.send(submit(name, max_new_tokens=LONG))
            listener.wait_for_tokens(name, 2)
        pid = service.engine_pid
        os.kill(pid, signal.SIGKILL)

        for name in "ab":
            ending = listener.wait_for_ending(name)
            assert ending.reason is FinishReason.FAILED
            assert ending.fault.code is FaultCode.ENGINE_DIED
            assert "killed by SIGKILL" in ending.fault.message

        again = submit("again", max_new_tokens=5)
        service.send(again)
        assert listener.wait_for_ending("again").reason is FinishReason.LENGTH
        assert outputs(listener.events)["again"] == continuation(again.prompt, 5)
        assert service.engine_pid != pid
        assert len(listener.threads) == 1
        [restart] = [event for event in listener.events if isinstance(event, EngineRestarted)]
        assert "killed by SIGKILL" in restart.reason


def test_the_stages_of_the_first_start_and_of_the_last_restart_are_kept(caplog):
    stages = (Stage("imports", 0.0, 1.5), Stage("weights", 1.5, 2.0))
    with supervised(partial(FakeDevice, stages=stages)) as (service, _):
        service.wait_until_ready(TIMEOUT_S)
        assert (service.state.start, service.state.restart) == (stages, ())
        os.kill(service.engine_pid, signal.SIGKILL)

        assert until(lambda: service.state.restart == stages)
        assert service.state.start == stages
    (line,) = [record for record in caplog.records if record.getMessage() == "The engine serves again."]
    assert (line.fields["seconds"], line.fields["stages"]) == (3.5, "imports 1.5, weights 2.0")


def test_when_no_new_engine_can_be_made_everybody_hears_of_it(monkeypatch, capsys):
    def no_room() -> None:
        raise OSError("no space left on device")

    with supervised(SLOW) as (service, listener):
        service.send(submit("open", max_new_tokens=LONG))
        listener.wait_for_tokens("open")
        monkeypatch.setattr(service, "_new_engine", no_room)
        os.kill(service.engine_pid, signal.SIGKILL)

        assert "no space left" in listener.wait_for_ending("open").fault.message
        assert service.state.phase is ServicePhase.DOWN
        with pytest.raises(RequestError, match="no space left"):
            service.send(submit("late"))
    assert "no space left" in capsys.readouterr().err


def add(service: SupervisedService, listener: Listener, message: AddAdapter) -> AdapterId:
    service.send(message)
    listener.wait_for_adapter(message.adapter.adapter_id, AdapterAdded)
    return message.adapter.adapter_id


def test_a_new_engine_knows_the_adapters_that_were_added_and_not_removed():
    with supervised(SLOW) as (service, listener):
        kept, gone, failed = add_adapter(1), add_adapter(2), add_adapter(3, path="broken")
        add(service, listener, kept)
        service.send(RemoveAdapter(adapter_id=add(service, listener, gone), at=0.0))
        listener.wait_for_adapter(2, AdapterRemoved)
        service.send(failed)
        listener.wait_for_adapter(3, AdapterRefused)
        os.kill(service.engine_pid, signal.SIGKILL)
        listener.wait_for_adapter(1, AdapterAdded, times=2)

        asked = [submit(f"for {number}", adapter=AdapterId(number)) for number in (1, 2, 3)]
        for message in asked:
            service.send(message)
        assert listener.wait_for_ending("for 1").reason is FinishReason.LENGTH
        assert outputs(listener.events)["for 1"] == continuation(asked[0].prompt, 4)
        for number in (2, 3):
            assert listener.wait_for_ending(f"for {number}").fault.code is FaultCode.UNKNOWN_ADAPTER


def test_adapters_are_known_to_a_request_that_comes_as_soon_as_the_engine_is_dead():
    with supervised(SLOW) as (service, listener):
        adapter = add(service, listener, add_adapter(1))
        service.send(submit("lost", max_new_tokens=LONG, adapter=adapter))
        listener.wait_for_tokens("lost")
        os.kill(service.engine_pid, signal.SIGKILL)
        listener.wait_for_ending("lost")
        service.send(submit("again", adapter=adapter))

        assert listener.wait_for_ending("again").reason is FinishReason.LENGTH


def test_what_was_asked_about_adapters_is_answered_when_the_engine_dies():
    with supervised(SLOW) as (service, listener):
        adapter = add(service, listener, add_adapter(1))
        service.send(submit("user", max_new_tokens=LONG, adapter=adapter))
        listener.wait_for_tokens("user")
        service.send(RemoveAdapter(adapter_id=adapter, at=0.0))
        os.kill(service.engine_pid, signal.SIGSTOP)  # from here on it answers nothing
        service.send(add_adapter(2))
        os.kill(service.engine_pid, signal.SIGKILL)

        assert "killed by SIGKILL" in listener.wait_for_adapter(2, AdapterRefused).reason
        listener.wait_for_adapter(1, AdapterRemoved)
        service.send(submit("late", adapter=adapter))
        assert listener.wait_for_ending("late").fault.code is FaultCode.UNKNOWN_ADAPTER


class FolderDevice(FakeDevice):
    """Can read an adapter as long as its folder is there."""

    def fetch(self, adapter: Adapter) -> Message:
        return super().fetch(adapter if Path(adapter.path).is_dir() else replace(adapter, path="broken"))


def test_an_adapter_that_a_new_engine_cannot_read_is_refused_and_the_next_engine_tries_again(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    with supervised(FolderDevice) as (service, listener):
        adapter = add(service, listener, add_adapter(1, path=str(folder)))
        folder.rmdir()
        os.kill(service.engine_pid, signal.SIGKILL)

        listener.wait_for_adapter(adapter, AdapterRefused)
        service.send(submit("late", adapter=adapter))
        assert listener.wait_for_ending("late").fault.code is FaultCode.UNKNOWN_ADAPTER

        folder.mkdir()
        os.kill(service.engine_pid, signal.SIGKILL)
        listener.wait_for_adapter(adapter, AdapterAdded, times=3)
        service.send(submit("later", adapter=adapter))
        assert listener.wait_for_ending("later").reason is FinishReason.LENGTH


def test_an_abort_reaches_the_engine():
    with supervised(SLOW) as (service, listener):
        service.send(submit("a", max_new_tokens=LONG))
        listener.wait_for_tokens("a")
        service.send(abort("a"))

        assert listener.wait_for_ending("a").reason is FinishReason.ABORT


def test_stopping_aborts_whoever_is_open_and_leaves_no_process():
    with supervised(SLOW) as (service, listener):
        service.send(submit("a", max_new_tokens=LONG))
        listener.wait_for_tokens("a")
        pid = service.engine_pid
        service.stop()

        assert listener.wait_for_ending("a", timeout_s=0.0).reason is FinishReason.ABORT
        assert not is_alive(pid)
        assert service.state.phase is ServicePhase.DOWN


def test_ctrl_c_is_left_to_the_parent():
    with supervised(SLOW) as (service, listener):
        service.wait_until_ready()
        os.kill(service.engine_pid, signal.SIGINT)
        service.send(submit("a"))

        assert listener.wait_for_ending("a").reason is FinishReason.LENGTH


def test_a_startup_failure_gives_its_sentence_and_is_not_tried_again():
    with supervised(no_such_model) as (service, listener):
        service.send(submit("early"))

        with pytest.raises(EngineDiedError, match=r"^There is no model in /nowhere\.$"):
            service.wait_until_ready()
        assert "/nowhere" in listener.wait_for_ending("early").fault.message
        with pytest.raises(RequestError, match="/nowhere"):
            service.send(submit("late"))


def load_for_ever() -> FakeDevice:
    hang()
    raise AssertionError


def test_an_engine_that_hangs_while_starting_is_given_up():
    with (
        supervised(load_for_ever, EngineTimeouts(start_s=0.5)) as (service, _),
        pytest.raises(EngineDiedError, match=r"not ready after 0\.5 seconds"),
    ):
        service.wait_until_ready()


def load_slowly() -> FakeDevice:
    for _ in range(24):
        START.tell_progress("Loading")
        time.sleep(0.02)  # so that most words come one by one
    return FakeDevice()


def test_a_start_that_tells_of_its_progress_may_take_longer_than_a_silence(monkeypatch):
    """By the clock here every word comes four seconds after the one before, however busy the machine is."""
    spend, hear = Silence.spend, Silence.hear

    def hear_late(silence: Silence, records: list[object]) -> None:
        spend(silence, 4.0)
        hear(silence, records)

    monkeypatch.setattr(Silence, "spend", lambda _silence, _seconds: None)
    monkeypatch.setattr(Silence, "hear", hear_late)
    with supervised(load_slowly, EngineTimeouts(start_silence_s=5.0)) as (service, _):
        assert service.wait_until_ready()


def test_a_start_that_makes_no_progress_is_a_hang():
    with (
        supervised(load_for_ever, EngineTimeouts(start_silence_s=0.5)) as (service, _),
        pytest.raises(EngineDiedError, match=r"start made no progress for 0\.5 seconds"),
    ):
        service.wait_until_ready()


def die_at_once() -> FakeDevice:
    os._exit(7)


def test_an_engine_that_keeps_dying_stays_down_and_says_why(caplog):
    with supervised(die_at_once, EngineTimeouts(quick_deaths=2, pause_s=0.01)) as (service, listener):
        service.send(submit("a"))

        assert "exit code 7" in listener.wait_for_ending("a").fault.message
        assert until(lambda: service.state.phase is not ServicePhase.STARTING), "it is still being started"
        assert "died 2 times in a row" in service.state.reason
        with pytest.raises(RequestError, match="exit code 7"):
            service.send(submit("b"))
    [line] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (line.getMessage(), line.fields["why"]) == ("The engine stays down.", service.state.reason)


def test_stopping_does_not_wait_for_an_engine_that_is_still_loading():
    with supervised(load_for_ever) as (service, _):
        service.stop()  # loading would take for ever


def test_two_threads_may_stop_it_at_once():
    with supervised(SLOW) as (service, _):
        service.wait_until_ready()
        stoppers = [threading.Thread(target=service.stop, daemon=True) for _ in range(2)]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join(TIMEOUT_S)

        assert not any(stopper.is_alive() for stopper in stoppers)


class DeafDevice(FakeDevice):
    """Is inside a call that lets no other thread run, from its first step on."""

    def submit(self, plan: StepPlan) -> FakeTicket:
        print("inside", flush=True)
        # The sleep of the C library, called so, keeps the interpreter's lock; no wait of Python's does.
        ctypes.PyDLL(None).sleep(3600)
        raise AssertionError


PARENT = """
import sys
import time
from rota.core.config import EngineConfig
from rota.runtime.timeouts import EngineTimeouts
from rota.runtime.supervisor import SupervisedService
from rota.start import START
from tests.builders import submit
from tests.runtime.services import SLOW, Listener
from tests.runtime.test_supervisor import DeafDevice
from tests.waiting import hang
if __name__ == "__main__":
    kind, listener = sys.argv[1], Listener()
    timeouts = EngineTimeouts(silence_s=3.0) if kind == "impatient" else None
    service = SupervisedService(DeafDevice if kind == "deaf" else SLOW, EngineConfig(), timeouts)
    service.start(listener)
    service.wait_until_ready()
    print(service.engine_pid, flush=True)
    if kind == "impatient":
        time.sleep(3.0)  # while it sleeps it is stopped and goes on
        service.send(submit("late"))
        listener.wait_for_ending("late")
        print(service.engine_pid, flush=True)
    service.send(submit("a"))
    hang()
"""


def parent_in(folder: Path, kind: str) -> AbstractContextManager[Program]:
    """A process that serves and keeps what it writes in this folder."""
    (folder / "parent.py").write_text(PARENT)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}
    return started([sys.executable, folder / "parent.py", kind], env=environment)


@pytest.mark.parametrize("kind", ["idle", "deaf"])
def test_the_engine_dies_with_its_parent_and_leaves_nothing_behind(tmp_path, kind):
    with parent_in(tmp_path, kind) as parent:
        engine_pid = int(line_of(parent))
        if kind == "deaf":
            assert line_of(parent) == "inside\n"
        assert is_alive(engine_pid)
        parent.kill()

        assert until(lambda: not is_alive(engine_pid)), "the engine has outlived its parent"
        assert [file.name for file in tmp_path.iterdir()] == ["parent.py"]


def test_an_engine_and_its_server_that_are_killed_at_once_leave_nothing_behind(tmp_path):
    with parent_in(tmp_path, "idle") as parent:
        line_of(parent)

    assert [file.name for file in tmp_path.iterdir()] == ["parent.py"]  # with the block the whole group was killed
