"""A disk that hangs costs one adapter, and a failure of the source or the disk is told apart from the adapter's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError, DiskError, FaultCode
from rota.core.ids import AdapterId
from rota.engine.lora.files.reader import AdapterReader, RefusedAdapter
from rota.engine.lora.host import HostAdapter
from rota.sources.source import ChangedError, UnreachableError
from tests.waiting import TIMEOUT_S, until

READ = HostAdapter((torch.zeros(1),), (0,), torch.zeros(1, 1, dtype=torch.int32))


def adapter(path: str) -> Adapter:
    return Adapter(adapter_id=AdapterId(1), name="parrot", path=path)


class Disk:
    """Answers at once, but for what lies under "hangs"."""

    def __init__(self) -> None:
        self.is_reading = threading.Event()
        self.answers = threading.Event()

    def __call__(self, adapter: Adapter) -> HostAdapter:
        self.is_reading.set()
        if adapter.path == "hangs":
            assert self.answers.wait(TIMEOUT_S)
        return READ


def test_a_read_that_hangs_is_given_up_and_the_next_ones_are_read(monkeypatch):
    disk, threads, timers = Disk(), [], []
    # A timer that never ends by itself: on a busy machine any read may take half a second.
    monkeypatch.setattr(threading.Timer, "start", lambda timer: timers.append(timer))
    reader = AdapterReader(disk, prepare=lambda: threads.append(threading.current_thread()), timeout_s=0.5)
    hangs, *others = [reader.submit(adapter(path)) for path in ("hangs", "b", "c")]
    assert disk.is_reading.wait(TIMEOUT_S)
    timers[0].function(*timers[0].args)

    assert hangs.result(TIMEOUT_S) == RefusedAdapter(
        "Adapter 'parrot' could not be read from hangs within 0.5 seconds."
    )
    assert [other.result(TIMEOUT_S) for other in others] == [READ, READ]
    # The one that hung comes back too late: nobody hears of it, and it reads nothing more.
    disk.answers.set()
    threads[0].join(TIMEOUT_S)
    assert not threads[0].is_alive()
    assert isinstance(hangs.result(), RefusedAdapter)
    assert reader.submit(adapter("d")).result(TIMEOUT_S) is READ
    reader.close()
    assert len(threads) == 2


def test_closing_ends_the_read_under_way_and_refuses_the_others():
    disk = Disk()
    reader = AdapterReader(disk)
    copies = [reader.submit(adapter(path)) for path in ("hangs", "b")]
    assert disk.is_reading.wait(TIMEOUT_S)
    closing = threading.Thread(target=reader.close)
    closing.start()
    assert until(lambda: reader._is_closing)
    disk.answers.set()
    closing.join(TIMEOUT_S)

    assert copies[0].result(TIMEOUT_S) is READ
    assert copies[1].result(TIMEOUT_S) == RefusedAdapter("Adapter 'parrot' was not read: the engine is stopping.")


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("no header")])
def test_whatever_goes_wrong_is_told_in_a_sentence(error):
    def fails(_: Adapter) -> HostAdapter:
        raise error

    reader = AdapterReader(fails)
    refused = reader.submit(adapter("/a")).result(TIMEOUT_S)
    assert refused == RefusedAdapter(f"Adapter 'parrot' could not be loaded from /a ({type(error).__name__}: {error}).")
    reader.close()


FAR = Adapter(adapter_id=AdapterId(1), name="far", path="s3://bucket/far#0123456789abcdef")
NEAR = Adapter(adapter_id=AdapterId(2), name="near", path="/adapters/near")


def refused_by(read: Callable[[Adapter], Any], adapter: Adapter, timeout_s: float = TIMEOUT_S) -> RefusedAdapter:
    reader = AdapterReader(read, timeout_s=timeout_s)
    copy = reader.submit(adapter).result(TIMEOUT_S)
    reader.close()
    assert isinstance(copy, RefusedAdapter)
    return copy


@pytest.mark.parametrize(
    ("adapter", "error", "code"),
    [
        (FAR, UnreachableError("The store did not answer in time."), FaultCode.SOURCE_AWAY),
        (FAR, DiskError("There is no room for it.", FaultCode.DISK_FULL), FaultCode.DISK_FULL),
        (FAR, DiskError("It fails.", FaultCode.DISK_FAILED), FaultCode.DISK_FAILED),
        (FAR, ChangedError("It changed while it was read."), FaultCode.ADAPTER_FAILED),
        (FAR, AdapterError("Its rank is too large."), FaultCode.ADAPTER_FAILED),
        (FAR, MemoryError(), FaultCode.ADAPTER_FAILED),
        (NEAR, AdapterError("There is no such folder."), FaultCode.ADAPTER_FAILED),
    ],
)
def test_only_a_source_that_does_not_answer_and_a_full_disk_may_pass(adapter, error, code):
    def read(_: Adapter) -> None:
        raise error

    assert refused_by(read, adapter).code is code


@pytest.mark.parametrize(("adapter", "code"), [(FAR, FaultCode.SOURCE_AWAY), (NEAR, FaultCode.ADAPTER_FAILED)])
def test_a_read_that_is_given_up_on_waits_for_its_source(adapter, code):
    answers = threading.Event()
    try:
        assert refused_by(lambda _: answers.wait(TIMEOUT_S), adapter, timeout_s=0.01).code is code
    finally:
        answers.set()
