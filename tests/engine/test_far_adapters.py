"""A failure of the source or of the disk is told apart from one that is the adapter's own."""

from __future__ import annotations

import pytest

from rota.core.adapter import Adapter
from rota.core.errors import AdapterError, DiskError, FaultCode
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed
from rota.engine.lora.adapters import Causes
from rota.sources.source import ChangedError, UnreachableError

FAR = Adapter(adapter_id=AdapterId(1), name="far", path="s3://bucket/far#0123456789abcdef")
NEAR = Adapter(adapter_id=AdapterId(2), name="near", path="/adapters/near")


def told(away: Causes, adapter: Adapter) -> FaultCode:
    message = away.with_code(AdapterFailed(adapter_id=adapter.adapter_id, at=1.0, reason="It could not be read."))
    assert isinstance(message, AdapterFailed)
    return message.code


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

    away = Causes()
    with pytest.raises(type(error)):
        away.noting(read)(adapter)

    assert told(away, adapter) is code
    assert told(away, adapter) is FaultCode.ADAPTER_FAILED, "what fails later, such as a copy, is another failure"


def test_a_read_that_is_given_up_on_waits_for_its_source():
    away, codes = Causes(), []

    def read(adapter: Adapter) -> str:
        codes.append(told(away, adapter))  # as the reader's clock tells while the read hangs
        return "a copy"

    assert away.noting(read)(FAR) == away.noting(read)(NEAR) == "a copy"
    assert codes == [FaultCode.SOURCE_AWAY, FaultCode.ADAPTER_FAILED]
    assert told(away, FAR) is FaultCode.ADAPTER_FAILED
