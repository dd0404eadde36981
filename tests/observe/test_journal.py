from __future__ import annotations

import io
import json

from rota.core.errors import Fault, FaultCode
from rota.core.events import Finished, FinishReason, SlotChanged, SlotState
from rota.core.ids import AdapterId, RequestId, Slot
from rota.observe.journal import Journal


def lines(file: io.BytesIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_every_event_is_one_line_with_its_name_and_fields():
    file = io.BytesIO()
    Journal(file).observe([SlotChanged(at=1.5, slot=Slot(0), adapter_id=AdapterId(2), state=SlotState.READY)])

    fields = {"at": 1.5, "slot": 0, "adapter_id": 2, "state": "ready", "reason": None, "detail": "", "engine_id": 0}
    assert lines(file) == [{"event": "slot_changed", **fields}]


def test_a_refused_request_says_why():
    file = io.BytesIO()
    fault = Fault(FaultCode.QUEUE_FULL, "3 requests already wait; try again later.")
    Journal(file).observe([Finished(request_id=RequestId("r"), at=1.0, reason=FinishReason.FAILED, fault=fault)])

    assert lines(file)[0]["fault"] == {"code": "queue_full", "message": fault.message, "param": None}


def test_asks_told_ahead_of_their_time_are_written_in_order():
    file = io.BytesIO()
    journal = Journal(file, name_of=lambda adapter: f"adapter{adapter}")
    journal.asked(RequestId("late"), AdapterId(2), 3.0)
    journal.asked(RequestId("early"), AdapterId(1), 1.0)
    journal.observe([Finished(request_id=RequestId("early"), at=2.0, reason=FinishReason.STOP)])
    journal.close()

    assert [(line["event"], line["at"]) for line in lines(file)] == [("asked", 1.0), ("finished", 2.0), ("asked", 3.0)]
    assert (lines(file)[0]["adapter_id"], lines(file)[0]["adapter"]) == (1, "adapter1")
