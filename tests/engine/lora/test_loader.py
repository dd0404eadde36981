"""Adapters arrive while others are on their way, and one that fails takes nobody with it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId, Slot
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.engine.lora.bank import Bank
from rota.engine.lora.host import HostAdapter
from rota.engine.lora.loader import AdapterLoader, TimedCopy, checkpoint_reader
from rota.engine.model.spec import ModelSpec
from tests.engine.lora.adapter_factory import make_adapter
from tests.waiting import TIMEOUT_S, until


class Mailbox:
    """Where messages come; can be waited on."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._changed = threading.Condition()

    def post(self, message: Message) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[tuple[type, int]]:
        """The first messages, as kind and adapter id."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= count, TIMEOUT_S), self.messages
            return [(type(message), message.adapter_id) for message in self.messages]


class Disk:
    """Reads real adapters, counts the reads, and stands still while its gate is shut."""

    def __init__(self, bank: Bank, spec: ModelSpec) -> None:
        self.reads: list[str] = []
        self.is_reading = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._read = checkpoint_reader(bank, spec)

    def read(self, adapter: Adapter) -> HostAdapter:
        self.reads.append(Path(adapter.path).name)
        self.is_reading.set()
        assert self.gate.wait(TIMEOUT_S)
        if adapter.path.endswith("explosive"):
            raise ZeroDivisionError("boom")
        return self._read(adapter)


@pytest.fixture(scope="module")
def adapters(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        make_adapter(root / name, model, seed)
    names = ("a", "b", "missing", "explosive")
    return {
        name: Adapter(adapter_id=AdapterId(at), name=name, path=str(root / name))
        for at, name in enumerate(names, start=1)
    }


@pytest.fixture
def bank(spec: ModelSpec) -> Bank:
    return Bank(spec, 2, 8, torch.float32, torch.device("cpu"))


@pytest.fixture
def disk(bank: Bank, spec: ModelSpec) -> Disk:
    return Disk(bank, spec)


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
def loader(bank, disk, mailbox):
    loader = AdapterLoader(bank, disk.read, mailbox.post)
    yield loader
    disk.gate.set()
    loader.close()


def test_a_fetched_adapter_is_loaded_without_reading_again(loader, disk, bank, mailbox, adapters):
    loader.fetch(adapters["a"])
    assert mailbox.wait_for(1) == [(AdapterFetched, 1)]
    loader.load(AdapterId(1), Slot(1))
    assert mailbox.wait_for(2)[1] == (AdapterReady, 1)

    assert disk.reads == ["a"]
    assert bank.factors(0, "down").ranks.tolist() == [0, 4]
    assert bank.factors(0, "down").b[1].any()


def test_a_load_does_not_wait_for_the_disk_to_bring_another(loader, disk, mailbox, adapters):
    loader.fetch(adapters["a"])
    mailbox.wait_for(1)
    disk.gate.clear()
    loader.fetch(adapters["b"])
    loader.load(AdapterId(1), Slot(0))

    assert mailbox.wait_for(2)[1] == (AdapterReady, 1)
    disk.gate.set()
    assert mailbox.wait_for(3)[2] == (AdapterFetched, 2)


def test_a_load_of_an_adapter_that_is_being_fetched_waits_for_it(loader, disk, bank, mailbox, adapters):
    disk.gate.clear()
    loader.fetch(adapters["a"])
    loader.load(AdapterId(1), Slot(0))
    assert not mailbox.messages
    assert not bank.factors(0, "o").ranks.any()
    disk.gate.set()

    assert sorted(mailbox.wait_for(2), key=str) == [(AdapterFetched, 1), (AdapterReady, 1)]
    assert disk.reads == ["a"]


def test_a_dropped_adapter_comes_back_from_its_path(loader, disk, bank, mailbox, adapters):
    loader.fetch(adapters["a"])
    mailbox.wait_for(1)
    loader.drop(AdapterId(1))
    loader.drop(AdapterId(1))
    assert loader.known == set()
    loader.fetch(adapters["a"])
    loader.load(AdapterId(1), Slot(0))

    assert mailbox.wait_for(3)[1:] == [(AdapterFetched, 1), (AdapterReady, 1)]
    assert disk.reads == ["a", "a"]
    assert bank.factors(1, "qkv").ranks.tolist() == [4, 0]


def test_an_adapter_fetched_twice_is_read_once_and_told_twice(loader, disk, mailbox, adapters):
    loader.fetch(adapters["a"])
    loader.fetch(adapters["a"])

    assert mailbox.wait_for(2) == [(AdapterFetched, 1), (AdapterFetched, 1)]
    assert disk.reads == ["a"]


def test_a_failing_read_is_told_with_its_reason_and_nobody_else_notices(loader, mailbox, adapters):
    for name in ("missing", "explosive", "a"):
        loader.fetch(adapters[name])

    assert mailbox.wait_for(3) == [(AdapterFailed, 3), (AdapterFailed, 4), (AdapterFetched, 1)]
    missing, explosive = (adapters[name].path for name in ("missing", "explosive"))
    assert [message.reason for message in mailbox.messages[:2]] == [
        f"There is no adapter folder at {missing}.",
        f"Adapter 'explosive' could not be loaded from {explosive} (ZeroDivisionError: boom).",
    ]


def test_a_load_that_cannot_be_read_or_copied_fails_and_the_next_one_does_not(loader, mailbox, adapters):
    loader.fetch(adapters["a"])
    loader.fetch(adapters["missing"])
    mailbox.wait_for(2)
    loader.load(AdapterId(3), Slot(0))
    assert mailbox.wait_for(3)[2] == (AdapterFailed, 3)
    loader.load(AdapterId(1), Slot(99))
    assert mailbox.wait_for(4)[3] == (AdapterFailed, 1)
    assert "Adapter 'a' could not be loaded" in mailbox.messages[3].reason
    loader.load(AdapterId(1), Slot(0))

    assert mailbox.wait_for(5)[4] == (AdapterReady, 1)


def test_a_copy_that_fails_on_the_device_is_told_too(loader, mailbox, adapters, monkeypatch):
    def lose(_: TimedCopy) -> float:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(TimedCopy, "wait", lose)
    loader.fetch(adapters["a"])
    loader.load(AdapterId(1), Slot(0))

    assert mailbox.wait_for(2)[1] == (AdapterFailed, 1)
    assert "the device is lost" in mailbox.messages[1].reason


@pytest.mark.usefixtures("disk")
def test_an_adapter_that_failed_is_read_anew_when_it_is_asked_for_again(loader, mailbox, adapters, model):
    late = Adapter(adapter_id=AdapterId(9), name="late", path=adapters["missing"].path.replace("missing", "late"))
    loader.fetch(late)
    assert mailbox.wait_for(1) == [(AdapterFailed, 9)]
    make_adapter(Path(late.path), model)
    loader.fetch(late)

    assert mailbox.wait_for(2)[1] == (AdapterFetched, 9)


def test_without_overlap_a_load_has_ended_when_it_returns(bank, disk, mailbox, adapters):
    loader = AdapterLoader(bank, disk.read, mailbox.post, overlaps=False)
    loader.fetch(adapters["a"])
    loader.load(AdapterId(1), Slot(0))

    assert (AdapterReady, 1) in mailbox.wait_for(2)
    assert bank.factors(0, "o").ranks.tolist() == [4, 0]
    loader.close()


def test_closing_ends_everything_with_a_message(bank, disk, mailbox, adapters):
    loader = AdapterLoader(bank, disk.read, mailbox.post)
    disk.gate.clear()
    loader.fetch(adapters["a"])
    loader.load(AdapterId(1), Slot(0))
    loader.fetch(adapters["b"])
    assert disk.is_reading.wait(TIMEOUT_S)
    opening = threading.Thread(target=lambda: (until(lambda: loader._reader._is_closing), disk.gate.set()))
    opening.start()
    loader.close()
    opening.join()

    assert sorted(mailbox.wait_for(3), key=str) == [(AdapterFailed, 2), (AdapterFetched, 1), (AdapterReady, 1)]
    assert [message.reason for message in mailbox.messages if isinstance(message, AdapterFailed)] == [
        "Adapter 'b' was not read: the engine is stopping."
    ]
    assert disk.reads == ["a"]


def test_adapters_that_could_not_be_fetched_are_forgotten(loader, mailbox):
    for number in range(20):
        loader.fetch(Adapter(adapter_id=AdapterId(100 + number), name="nothing", path="/nowhere/explosive"))
    mailbox.wait_for(20)
    loader.fetch(Adapter(adapter_id=AdapterId(200), name="nothing", path="/nowhere/explosive"))
    mailbox.wait_for(21)

    assert len(loader._copies) <= 2
    assert len(loader._adapters) <= 2


def test_an_idle_fetch_delays_no_other(loader, disk, mailbox, adapters):
    disk.gate.clear()
    loader.fetch(adapters["a"], is_idle=True)
    assert disk.is_reading.wait(TIMEOUT_S)
    disk.is_reading.clear()
    loader.fetch(adapters["b"])
    assert disk.is_reading.wait(TIMEOUT_S), "the second read has begun though the first has not ended"
    disk.gate.set()

    assert set(mailbox.wait_for(2)) == {(AdapterFetched, 1), (AdapterFetched, 2)}


def test_a_load_of_an_adapter_that_is_fetched_idly_waits_for_that_read(loader, disk, mailbox, adapters):
    disk.gate.clear()
    loader.fetch(adapters["a"], is_idle=True)
    pending = loader.load(AdapterId(1), Slot(0))
    disk.gate.set()
    pending.wait()

    assert mailbox.wait_for(2) == [(AdapterFetched, 1), (AdapterReady, 1)]
    assert disk.reads == ["a"]


def test_closing_during_an_idle_fetch_ends_it_with_a_message(bank, disk, mailbox, adapters):
    loader = AdapterLoader(bank, disk.read, mailbox.post, overlaps=True)
    disk.gate.clear()
    loader.fetch(adapters["a"], is_idle=True)
    assert disk.is_reading.wait(TIMEOUT_S)
    loader.fetch(adapters["b"], is_idle=True)
    closing = threading.Thread(target=loader.close)
    closing.start()
    assert until(lambda: loader._idle_reader._is_closing)
    disk.gate.set()
    closing.join(TIMEOUT_S)

    assert mailbox.wait_for(2) == [(AdapterFetched, 1), (AdapterFailed, 2)]
    assert disk.reads == ["a"]


def test_a_load_whose_pages_do_not_hold_its_adapter_fails_and_touches_no_other(spec, mailbox, model, tmp_path):
    bank = Bank(spec, 2, 16, torch.float32, torch.device("cpu"), pages=3)
    loader = AdapterLoader(bank, checkpoint_reader(bank, spec), mailbox.post)
    large = Adapter(adapter_id=AdapterId(1), name="large", path=str(make_adapter(tmp_path, model, r=12)))
    loader.fetch(large)
    assert mailbox.wait_for(1) == [(AdapterFetched, 1)]
    loader.load(AdapterId(1), Slot(0), pages=(2, 0))
    mailbox.wait_for(2)
    loader.load(AdapterId(1), Slot(1), pages=(1,))

    assert mailbox.wait_for(3)[1:] == [(AdapterReady, 1), (AdapterFailed, 1)]
    assert bank.factors(0, "down").ranks.tolist() == [12, 0]
    assert not bank.factors(0, "down").b[1].any()
    loader.close()
