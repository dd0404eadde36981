"""An adapter that engines die of is read alone, and then quarantined; nobody else is blamed."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter

import pytest

from rota.core.adapter import Adapter
from rota.core.errors import ConfigError, EngineDiedError, FaultCode, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, EngineRestarted, FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import AdapterReady, AddAdapter, Message
from rota.core.plan import StepPlan
from rota.runtime.blame import REMEMBERED_S, Blame
from rota.runtime.process import EngineProcess
from rota.runtime.service import ServicePhase, is_own
from rota.runtime.timeouts import EngineTimeouts
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice, FakeTicket
from tests.runtime.services import SLOW, supervised
from tests.waiting import hang, until


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def an_adapter(name: str, owner: str | None = "acme", path: str | None = None, seals: tuple[str, ...] = ()) -> Adapter:
    return Adapter(adapter_id=AdapterId(1), name=name, path=path or f"/{name}", owner=owner, seals=seals)


def told(blame: Blame, adapter: Adapter) -> AddAdapter:
    return blame.judged(AddAdapter(adapter=adapter, at=0.0))


def test_the_first_death_has_an_adapter_read_alone_and_the_second_quarantines_it():
    blame, bad = Blame(), an_adapter("bad")
    assert told(blame, bad) == AddAdapter(adapter=bad, at=0.0)
    assert blame.note_death([bad], "It hung.") is bad
    assert (told(blame, bad).adapter.is_read_alone, told(blame, bad).refusal) == (True, "")
    assert not told(blame, an_adapter("good")).adapter.is_read_alone

    blame.note_death([bad], "It hung.")
    refused = told(blame, bad)
    assert refused.refusal_code is FaultCode.QUARANTINED
    assert "'bad' is quarantined" in refused.refusal
    assert "It hung." not in refused.refusal, "an engine's own words are for operators"
    assert "It hung." in blame.quarantines[0].reason
    with pytest.raises(RequestError, match="'bad' is quarantined"):
        blame.refuse_name("bad")
    blame.refuse_name("good")


def test_of_several_adapters_none_is_blamed_and_each_is_read_alone():
    blame, some = Blame(), [an_adapter("a"), an_adapter("b")]
    assert [blame.note_death(some, "It hung.") for _ in range(5)] == [None] * 5
    assert [told(blame, one).adapter.is_read_alone for one in some] == [True, True]
    assert not blame.quarantines
    assert blame.note_death([], "It hung.") is None


def test_deaths_that_are_a_day_apart_are_two_accidents():
    clock = Clock()
    blame, bad = Blame(now=clock), an_adapter("bad")
    blame.note_death([bad], "It hung.")
    clock.time += REMEMBERED_S
    blame.note_death([bad], "It hung.")
    assert not blame.quarantines
    clock.time += REMEMBERED_S - 1.0
    blame.note_death([bad], "It hung.")
    assert [one.name for one in blame.quarantines] == ["bad"]


# The next adapter, and whether the quarantine of version 1 of acme's 'bad', in /bad, holds for it too.
NEXT = [
    (an_adapter("bad"), True),
    (an_adapter("bad", path="/new"), True),  # what the same key loads in its place
    (an_adapter("bad", path="/old", seals=("was read",)), False),  # a version that an engine has read
    (an_adapter("bad", owner=None, path="/other"), False),
    (an_adapter("bad", owner="birds", path="/other"), False),
    (an_adapter("good"), False),
]


@pytest.mark.parametrize(("adapter", "is_covered"), NEXT)
def test_a_quarantine_holds_for_what_its_key_loads_next_but_for_no_version_that_serves(adapter, is_covered):
    blame = Blame()
    for _ in range(2):
        blame.note_death([an_adapter("bad")], "It hung.")
    assert bool(told(blame, adapter).refusal) == is_covered


def test_two_quarantines_bar_a_key_until_an_operator_gives_the_right_back():
    blame = Blame()
    for name in ("a", "a", "b"):
        blame.note_death([an_adapter(name)], "It hung.")
    assert blame.barred == []
    blame.note_death([an_adapter("b")], "It hung.")
    assert blame.barred == ["acme"]
    assert blame.lift("a")
    assert blame.barred == ["acme"], "an adapter that is lifted gives no right back"
    assert blame.give_back("acme")
    assert blame.barred == []
    assert not blame.give_back("acme")


def test_a_new_name_for_each_adapter_does_not_help_a_key():
    blame = Blame()
    for name in "abcd":
        blame.note_death([an_adapter(name)], "It hung.")
    assert blame.barred == ["acme"]
    for name in "abcdefgh":
        blame.note_death([an_adapter(name, owner=None)], "It hung.")
    assert blame.barred == ["acme"], "an operator's adapters bar nobody"


def test_a_quarantine_that_is_lifted_lets_the_adapter_be_read_alone():
    blame, bad = Blame(), an_adapter("bad")
    for _ in range(2):
        blame.note_death([bad], "It hung.")
    assert blame.lift("bad")
    assert not blame.lift("bad")
    assert (told(blame, bad).refusal, told(blame, bad).adapter.is_read_alone) == ("", True)
    blame.note_death([bad], "It hung.")
    assert not blame.quarantines, "it begins anew"


def test_quarantines_outlast_the_server(tmp_path):
    path = tmp_path / "keys.toml.quarantine.json"
    blame = Blame(path)
    assert not path.exists()
    for name in ("a", "a", "b", "b"):
        blame.note_death([an_adapter(name)], "It hung.")
    later = Blame(path)
    assert (later.quarantines, later.barred) == (blame.quarantines, ["acme"])
    later.lift("a")
    later.give_back("acme")
    assert ([one.name for one in Blame(path).quarantines], Blame(path).barred) == (["b"], [])
    path.write_text('{"adapters": [{}], "keys": {}}')
    with pytest.raises(ConfigError, match="remove the file"):
        Blame(path)


def test_a_folder_that_cannot_be_written_to_costs_only_the_memory(tmp_path, caplog):
    blame = Blame(tmp_path / "missing" / "file")
    for _ in range(2):
        blame.note_death([an_adapter("bad")], "It hung.")
    assert [one.name for one in blame.quarantines] == ["bad"]
    assert "cannot be kept over a restart" in caplog.text


class Poisoned(FakeDevice):
    """Dies of the adapters whose paths say how, and reads the others."""

    def fetch(self, adapter: Adapter) -> Message:
        if "hangs" in adapter.path:
            hang()
        if "crashes" in adapter.path:
            time.sleep(0.5)  # a file takes a while to crash a process; until then the engine's message has left
            os.abort()
        if "raises" in adapter.path:
            raise ZeroDivisionError
        if "memory" in adapter.path:
            raise MemoryError
        if "killed" in adapter.path:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch(adapter)


class FailsAtSteps(FakeDevice):
    """Reads adapters for a long time, and fails at its first step with tokens."""

    def fetch(self, adapter: Adapter) -> Message:
        return AdapterReady(adapter.adapter_id, self.now())  # says nothing of the read, which goes on

    def submit(self, plan: StepPlan) -> FakeTicket:
        if plan.tokens:
            raise ZeroDivisionError
        return super().submit(plan)


def known(adapter_id: int, name: str, path: str) -> AddAdapter:
    adapter = Adapter(adapter_id=AdapterId(adapter_id), name=name, path=path)
    return AddAdapter(adapter=adapter, at=0.0, is_known=True, is_read_later=True)


def test_known_adapters_that_engines_die_of_are_quarantined_one_after_the_other_and_all_others_serve():
    # Six deaths soon after a start, of which the supervisor would bear one.
    timeouts = EngineTimeouts(silence_s=3.0, quick_deaths=2, pause_s=0.0)
    with supervised(Poisoned, timeouts) as (service, listener):
        service.wait_until_ready()
        for number, how in enumerate(("hangs", "crashes", "raises"), 1):
            service.send(known(number, f"bad-{how}", f"/{how}"))
        service.send(known(4, "good", "/good"))
        for number in (1, 2, 3):
            assert listener.wait_for_adapter(number, AdapterRefused).code is FaultCode.QUARANTINED
        service.send(submit("after", adapter=4))
        assert listener.wait_for_ending("after").reason is FinishReason.LENGTH
        restarts = [event for event in listener.events if isinstance(event, EngineRestarted)]
        assert Counter(event.died_of for event in restarts) == {1: 2, 2: 2, 3: 2}
        [first, second] = [event.reason for event in restarts if event.died_of == 2]
        assert first.endswith("It was reading the adapter 'bad-crashes'.")
        assert second.endswith("That adapter is quarantined now.")


@pytest.mark.parametrize("how", ["memory", "killed"])
def test_lack_of_memory_and_kills_from_outside_blame_nobody(how):
    blame = Blame()
    with supervised(Poisoned, EngineTimeouts(quick_deaths=2), blame=blame) as (service, listener):
        service.wait_until_ready()
        service.send(known(1, "unlucky", f"/{how}"))
        assert until(lambda: service.state.phase is ServicePhase.DOWN), "it dies each time, and is given up"
    restarts = [event for event in listener.events if isinstance(event, EngineRestarted)]
    assert [event.died_of for event in restarts] == [None]
    assert not blame.quarantines
    assert not told(blame, an_adapter("unlucky")).adapter.is_read_alone


def test_an_adapter_that_is_loaded_again_and_again_is_quarantined_too():
    blame = Blame()
    with supervised(Poisoned, blame=blame) as (service, listener):
        service.wait_until_ready()
        codes = []
        for number in (1, 2, 3):
            adapter = Adapter(adapter_id=AdapterId(number), name="bad", path=f"/crashes/{number}", owner="acme")
            service.send(AddAdapter(adapter=adapter, at=0.0))
            codes.append(listener.wait_for_adapter(number, AdapterRefused).code)
        assert codes == [FaultCode.ENGINE_DIED, FaultCode.QUARANTINED, FaultCode.QUARANTINED]
        assert len([event for event in listener.events if isinstance(event, EngineRestarted)]) == 2


def test_an_engine_that_dies_while_it_serves_one_adapter_says_so_and_quarantines_nobody():
    with supervised(SLOW, EngineTimeouts(), EngineProcess) as (service, listener):
        service.wait_until_ready()
        service.send(add_adapter(1))
        listener.wait_for_adapter(1, AdapterAdded)
        service.send(submit("open", adapter=1, max_new_tokens=1000))
        listener.wait_for_tokens("open")
        os.kill(service.engine_pid, signal.SIGSEGV)
        listener.wait_for_ending("open")
        [restart] = [event for event in listener.events if isinstance(event, EngineRestarted)]
        assert restart.died_of == 1
        assert "reading" not in restart.reason


def test_an_error_of_a_step_blames_no_adapter_that_is_read_meanwhile():
    blame = Blame()
    with supervised(FailsAtSteps, EngineTimeouts(quick_deaths=2), blame=blame) as (service, listener):
        service.wait_until_ready()
        service.send(known(1, "innocent", "/good"))
        service.send(submit("kills"))
        assert listener.wait_for_ending("kills").fault.code is FaultCode.ENGINE_DIED
    assert not told(blame, an_adapter("innocent")).adapter.is_read_alone


SHORTAGES = [
    (MemoryError(), False),
    (OSError(errno.ENOMEM, "no"), False),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"), False),
    (RuntimeError("CUDA error: out of memory"), False),
    (EngineDiedError("Rank 1 was killed."), False),
    (RuntimeError("an illegal memory access was encountered"), True),
    (ZeroDivisionError(), True),
]


@pytest.mark.parametrize(("error", "is_blamed"), SHORTAGES, ids=str)
def test_lack_of_memory_is_known_in_all_its_words(error, is_blamed):
    assert is_own(error) == is_blamed
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = error
    assert is_own(wrapped) == is_blamed
