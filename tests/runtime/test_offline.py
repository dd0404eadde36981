from __future__ import annotations

import math

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import StuckError
from rota.core.events import Event, Finished, FinishReason
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.offline import OfflineInbox
from rota.scheduler import Scheduler
from tests.builders import capacity, request
from tests.fakes import FakeDevice, continuation, endings, outputs


def serve(inbox: OfflineInbox, on_token=lambda _: None, config: SchedulerConfig | None = None) -> list[Event]:
    device = FakeDevice(capacity=capacity(rows=4))
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        events.extend(batch)
        for event in batch:
            if isinstance(event, Finished):
                inbox.note_ended(event.request_id)
            else:
                for request_id in getattr(event, "request_ids", ()):
                    on_token(request_id)

    run(Scheduler(config or SchedulerConfig(), device.capacity), LiveWorld(device, inbox), emit)
    return events


def test_the_loop_returns_when_the_last_request_has_ended():
    requests = [request(f"r{i}", prompt=4 + i, max_new_tokens=3 + i) for i in range(9)]
    events = serve(OfflineInbox(requests, max_open=100))

    assert outputs(events) == {
        asked.request_id: continuation(asked.prompt, asked.sampling.max_new_tokens) for asked in requests
    }


def test_more_requests_than_may_wait_are_all_served():
    requests = [request(f"r{i}", max_new_tokens=2) for i in range(30)]
    events = serve(OfflineInbox(requests, max_open=5), config=SchedulerConfig(max_queued_requests=5))

    assert [ending.reason for ending in endings(events).values()] == [FinishReason.LENGTH] * 30


def test_an_aborted_request_ends_and_the_others_go_on():
    inbox = OfflineInbox([request("a", max_new_tokens=50), request("b", max_new_tokens=8)], max_open=5)
    events = serve(inbox, on_token=lambda request_id: request_id == "a" and inbox.abort(request_id))

    assert endings(events)["a"].reason is FinishReason.ABORT
    assert len(outputs(events)["a"]) < 5
    assert len(outputs(events)["b"]) == 8


def test_waiting_for_ever_is_an_error_instead_of_a_hang():
    inbox = OfflineInbox([request("a")], max_open=5, timeout_s=0.01)
    inbox.take(math.inf)

    with pytest.raises(StuckError, match="1 requests wait"):
        inbox.take(math.inf)
