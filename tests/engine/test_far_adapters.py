"""A failure of the source or of the disk is told apart from one that is the adapter's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError, DiskError, FaultCode
from rota.core.ids import AdapterId
from rota.engine.lora.files.reader import AdapterReader, RefusedAdapter
from rota.sources.source import ChangedError, UnreachableError
from tests.waiting import TIMEOUT_S

FAR = Adapter(adapter_id=AdapterId(1), name="far", path="s3://bucket/far#0123456789abcdef")
NEAR = Adapter(adapter_id=AdapterId(2), name="near", path="/adapters/near")


def refused(read: Callable[[Adapter], Any], adapter: Adapter, timeout_s: float = TIMEOUT_S) -> RefusedAdapter:
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

    assert refused(read, adapter).code is code


@pytest.mark.parametrize(("adapter", "code"), [(FAR, FaultCode.SOURCE_AWAY), (NEAR, FaultCode.ADAPTER_FAILED)])
def test_a_read_that_is_given_up_on_waits_for_its_source(adapter, code):
    answers = threading.Event()
    try:
        assert refused(lambda _: answers.wait(TIMEOUT_S), adapter, timeout_s=0.01).code is code
    finally:
        answers.set()
