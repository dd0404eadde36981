"""An engine elsewhere serves, dies, hangs, stops and is started again like one in a process of this machine."""

from __future__ import annotations

import hashlib
import os
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from rota.core.adapter import Adapter
from rota.core.config import EngineConfig
from rota.core.errors import EngineDiedError, FaultCode
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, EngineRestarted, FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, Message, RemoveAdapter
from rota.runtime.cluster.line import GuardedLine
from rota.runtime.cluster.records import Invitation, Joined
from rota.runtime.cluster.remote_engine import LINE_LOST, RemoteEngine, run_invited
from rota.runtime.service import ServicePhase
from rota.runtime.spool import Spool
from rota.runtime.supervisor import SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from rota.runtime.wire import Ready, receive_all
from tests.builders import abort, add_adapter, submit
from tests.fakes import FakeDevice, continuation, no_such_model, outputs
from tests.processes import is_alive
from tests.runtime.cluster.elsewhere import HOST, Elsewheres, NearElsewhere
from tests.runtime.services import LONG, SLOW, Listener, supervised
from tests.waiting import TIMEOUT_S, until


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


# ── the end of one side, and the other ────────────────────────────────────────────────────────────────────────────────

NOT_HERE = "203.0.113.1"  # an address for documentation, which no machine has


@contextmanager
def front_line():
    context = zmq.Context()
    line = GuardedLine(context, on_lost=lambda: None)
    try:
        yield line
    finally:
        line.close()
        context.destroy(linger=0)


def test_an_engine_ends_when_its_front_is_gone():
    elsewhere = NearElsewhere(FakeDevice, EngineConfig())

    def on_joined(line: GuardedLine, joined: Joined) -> None:
        line.expect(joined.engine_key)
        line.connect(joined.messages, joined.engine_key)

    with front_line() as line:
        elsewhere.start(Invitation(line.listen(HOST), line.public_key), partial(on_joined, line))
        assert line.inbox.poll(TIMEOUT_S * 1000.0)
        assert isinstance(receive_all(line.inbox)[0], Ready)

    elsewhere.join(TIMEOUT_S)
    assert elsewhere.exitcode == LINE_LOST
    assert not is_alive(elsewhere.joined.pid)


def test_an_engine_that_cannot_listen_ends_and_has_not_joined(capfd):
    told = run_invited(FakeDevice, EngineConfig(), Invitation("tcp://127.0.0.1:9", "k"), NOT_HERE)

    assert list(told) == [1]
    assert f"No port could be taken at {NOT_HERE}" in capfd.readouterr().err


def test_a_front_that_cannot_listen_says_so():
    def new_engine(context, build_device, config):
        return RemoteEngine(context, NearElsewhere(build_device, config), NOT_HERE)

    service = SupervisedService(FakeDevice, EngineConfig(), new_engine=new_engine)
    service.start(Listener())
    with pytest.raises(EngineDiedError, match=f"No port could be taken at {NOT_HERE}"):
        service.wait_until_ready()
    service.stop()


# ── adapters that came in bodies ──────────────────────────────────────────────────────────────────────────────────────

WEIGHTS = bytes(range(256)) * 40_000  # of three pieces


class OtherMachine(FakeDevice):
    """Reads an adapter only on its own disk, and only if its content is what its name says."""

    def fetch(self, adapter: Adapter) -> Message:
        path = Path(adapter.path) / "adapter_model.safetensors"
        if os.environ["TMPDIR"] not in adapter.path or hashlib.sha256(path.read_bytes()).hexdigest() != adapter.name:
            return AdapterFailed(adapter_id=adapter.adapter_id, at=0.0, reason=f"{path} is not the upload.")
        return super().fetch(adapter)


def test_an_upload_is_served_elsewhere_until_it_is_removed(tmp_path: Path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    folder = (spool := Spool(here)).new_folder()
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    monkeypatch.setenv("TMPDIR", str(there))
    name = hashlib.sha256(WEIGHTS).hexdigest()
    with supervised(OtherMachine, new_engine=Elsewheres().new_engine) as (service, listener):
        service.send(add_adapter(1, name=name, path=str(folder), root=str(spool.root)))
        listener.wait_for_adapter(1, AdapterAdded)
        os.kill(service.engine_pid, signal.SIGKILL)
        assert until(lambda: any(isinstance(event, EngineRestarted) for event in listener.events))
        service.send(submit("again", max_new_tokens=2, adapter=AdapterId(1)))
        assert listener.wait_for_ending("again").reason is FinishReason.LENGTH
        service.send(RemoveAdapter(adapter_id=AdapterId(1), at=0.0))
        listener.wait_for_adapter(1, AdapterRemoved)
        assert until(lambda: not list(there.glob("rota-spool-*/*/*"))), "its files are still there"
        service.send(add_adapter(2, name="another content", path=str(folder), root=str(spool.root)))
        refused = listener.wait_for_adapter(2, AdapterRefused)
        assert "is not the upload" in refused.reason
        assert until(lambda: not list(there.glob("rota-spool-*/*/*")))
    assert not list(there.glob("rota-spool-*"))
