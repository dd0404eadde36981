"""The live world: what an inbox gives, and what is sorted out before the loop hears of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq

from rota.core.adapter import Adapter
from rota.core.config import SchedulerConfig
from rota.core.errors import StuckError
from rota.core.events import Event, Finished, FinishReason
from rota.core.grammar import Grammar
from rota.core.ids import AdapterId
from rota.core.messages import AbortAll, Message, RemoveAdapter
from rota.runtime.in_process import ThreadInbox
from rota.runtime.live import AdapterChecks, LiveWorld, Preparation
from rota.runtime.loop import run
from rota.runtime.wire import SocketInbox, Stop, encode, open_socket
from rota.scheduler import Scheduler
from tests.builders import abort, add_adapter, capacity, request, submit
from tests.fakes import FakeDevice, continuation, endings, outputs
from tests.offline import OfflineInbox
from tests.waiting import TIMEOUT_S

# ── inboxes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class ListInbox:
    """Gives what it has at once, and closes when told."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.is_closed = False
        self.waits: list[float] = []

    def post(self, message: Message) -> None:
        self.messages.append(message)

    def take(self, wait_s: float) -> list[Message] | None:
        self.waits.append(wait_s)
        messages, self.messages = self.messages, []
        return None if self.is_closed and not messages else messages


def test_a_message_ends_the_wait_for_one():
    inbox = ThreadInbox()
    world = LiveWorld(FakeDevice(), inbox)
    threading.Timer(0.05, inbox.post, [abort("late")]).start()

    assert world.receive(math.inf) == [abort("late")]


def test_waiting_ends_at_the_time_asked_for():
    world = LiveWorld(FakeDevice(), ThreadInbox())
    until = world.now() + 0.03

    assert world.receive(until) == []
    assert until <= world.now()


def test_a_busy_loop_is_not_kept_waiting():
    inbox = ListInbox()
    world = LiveWorld(FakeDevice(), inbox)

    assert world.receive(world.now()) == []
    assert inbox.waits == [0.0]


class IdleWorker(FakeDevice):
    """Has so many things to do that can wait."""

    def __init__(self, left: int, inbox: ThreadInbox) -> None:
        super().__init__()
        self.left, self._inbox = left, inbox

    def work_while_idle(self) -> bool:
        self.left -= 1
        if not self.left:
            self._inbox.post(abort("after all of it"))
        return self.left > 0


def test_a_device_does_what_can_wait_while_no_message_comes_and_then_no_more():
    inbox = ThreadInbox()
    device = IdleWorker(3, inbox)
    world = LiveWorld(device, inbox)

    assert world.receive(math.inf) == [abort("after all of it")]
    assert world.receive(world.now() + 0.1) == []
    assert device.left == 0


def test_a_message_goes_before_what_can_wait():
    inbox = ThreadInbox()
    device = IdleWorker(3, inbox)
    inbox.post(abort("first"))

    assert LiveWorld(device, inbox).receive(math.inf) == [abort("first")]
    assert device.left == 3


def test_a_closed_inbox_aborts_all_once_and_then_nothing_ever_comes():
    inbox = ThreadInbox()
    world = LiveWorld(FakeDevice(), inbox)
    inbox.post(abort("last"))
    inbox.close()

    assert world.receive(math.inf) == [abort("last")]
    (message,) = world.receive(math.inf) or []
    assert isinstance(message, AbortAll)
    assert world.receive(world.now()) == []  # a step may still be in flight
    assert world.receive(math.inf) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_closing_ends_the_loop_and_every_open_request(depth):
    inbox = ListInbox(submit("a", max_new_tokens=400), submit("b", max_new_tokens=2))
    device = FakeDevice()
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        events.extend(batch)
        inbox.is_closed = len(outputs(events).get("a", [])) >= 5

    run(Scheduler(SchedulerConfig(), device.capacity), LiveWorld(device, inbox), emit, depth)

    assert {id: ending.reason for id, ending in endings(events).items()} == {
        "a": FinishReason.ABORT,
        "b": FinishReason.LENGTH,
    }


def test_the_live_world_gives_the_tokens_of_a_faultless_run():
    requests = [submit(f"r{i}", prompt=5 + 9 * i, max_new_tokens=12) for i in range(6)]
    inbox = ListInbox(*requests)
    device = FakeDevice()
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        events.extend(batch)
        inbox.is_closed = len(endings(events)) == len(requests)

    run(Scheduler(SchedulerConfig(), device.capacity), LiveWorld(device, inbox), emit)

    assert outputs(events) == {message.request_id: continuation(message.prompt, 12) for message in requests}


def test_a_socket_is_an_inbox_that_a_stop_closes(tmp_path):
    context = zmq.Context()
    sender, receiver = open_socket(context, zmq.PUSH), open_socket(context, zmq.PULL)
    sender.connect(f"ipc://{tmp_path}/inbox")
    receiver.bind(f"ipc://{tmp_path}/inbox")
    inbox = SocketInbox(receiver)

    assert inbox.take(0.01) == []
    message = submit("a", prompt=40, stop=("\n",), stop_token_ids=frozenset({1, 2}), seed=7)
    sender.send(encode([message]))
    assert inbox.take(math.inf) == [message]
    sender.send(encode([abort("a"), Stop()]))
    assert inbox.take(math.inf) == [abort("a")]
    assert inbox.take(math.inf) is None
    context.destroy()


# ── grammars that are not ready ───────────────────────────────────────────────────────────────────────────────────────

GRAMMAR = Grammar("slow")


class Slow:
    """Grammars become ready when the test says so; one is ready from the start."""

    def __init__(self) -> None:
        self.posted: list[Message] = []
        self._waiting: list[Callable[[], None]] = []
        self.preparation = Preparation(self._prepare, self.posted.append)

    def _prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        if grammar.text == "ready":
            return False
        self._waiting.append(then)
        return True

    def ready(self) -> list[Message]:
        """All grammars are ready; what the loop hears next."""
        for then in self._waiting:
            then()
        self._waiting.clear()
        heard, self.posted[:] = self.preparation.sift(self.posted), []
        return heard


@pytest.fixture
def slow() -> Slow:
    return Slow()


def test_only_requests_whose_grammar_is_not_ready_wait(slow):
    held, ready = submit("held", grammar=GRAMMAR), submit("ready", grammar=Grammar("ready"))
    others = [submit("free"), ready, add_adapter(1), abort("free")]

    assert slow.preparation.sift([held, *others]) == others
    assert slow.ready() == [held]
    assert slow.ready() == []


def test_an_adapter_leaves_after_a_request_that_came_before_and_still_waits_for_its_grammar(slow):
    held, other = (submit(id, grammar=GRAMMAR, adapter=AdapterId(1)) for id in ("held", "other"))
    removals = [RemoveAdapter(adapter_id=AdapterId(number), at=0.0) for number in (1, 2)]

    assert slow.preparation.sift([held, other, *removals]) == [removals[1]]
    assert slow.preparation.sift([abort("other")]) == [other, abort("other")]
    assert slow.ready() == [held, removals[0]]
    assert slow.preparation.sift([held, removals[0], AbortAll(1.0)]) == [held, removals[0], AbortAll(1.0)]
    forced = RemoveAdapter(adapter_id=AdapterId(1), at=0.0, is_forced=True)
    assert slow.preparation.sift([held, forced]) == [forced]


def test_a_request_whose_client_leaves_is_heard_before_its_abort_and_never_again(slow):
    held = submit("held", grammar=GRAMMAR)
    slow.preparation.sift([held])

    assert slow.preparation.sift([abort("held")]) == [held, abort("held")]
    assert slow.ready() == []


def test_at_the_end_all_are_heard(slow):
    held = [submit(f"held{number}", grammar=GRAMMAR) for number in range(3)]
    slow.preparation.sift(held)

    assert slow.preparation.sift([AbortAll(1.0)]) == [*held, AbortAll(1.0)]
    assert slow.ready() == []


# ── adapters that are read later ──────────────────────────────────────────────────────────────────────────────────────


def refuse_two(adapter: Adapter) -> str:
    return "It is bad." if adapter.adapter_id == 2 else ""


def later(number: int, **fields: bool):
    return replace(add_adapter(number), is_read_later=True, **fields)


def test_a_bad_one_is_marked_and_the_order_stays():
    messages = [later(1), submit("a"), later(2), abort("a"), later(3)]

    assert AdapterChecks(refuse_two).sift(messages) == [
        messages[0],
        messages[1],
        replace(later(2), refusal="It is bad."),
        *messages[3:],
    ]


def test_what_is_read_at_once_or_was_known_before_is_not_checked():
    messages = [add_adapter(2), later(2, is_known=True)]
    assert AdapterChecks(refuse_two).sift(messages) is messages


def test_a_disk_that_hangs_is_given_up_on_and_the_others_are_known():
    ends = threading.Event()

    def hang_at_two(adapter: Adapter) -> str:
        return str(ends.wait(TIMEOUT_S)) if adapter.adapter_id == 2 else ""

    first, second = AdapterChecks(hang_at_two, timeout_s=0.2).sift([later(1), later(2)])
    ends.set()

    assert first == later(1)
    assert second.refusal == "Adapter 'adapter2' could not be read from adapters/2 within 0.2 seconds."


def test_a_start_waits_for_some_checks_and_not_for_thousands():
    checked: list[int] = []

    def note(adapter: Adapter) -> str:
        checked.append(adapter.adapter_id)
        return ""

    checks = AdapterChecks(note, most=3)
    for messages in ([later(1), later(2)], [later(3), later(4)], [later(5)]):
        assert checks.sift(messages) == messages
    assert sorted(checked) == [1, 2, 3]


# ── without a server ──────────────────────────────────────────────────────────────────────────────────────────────────


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
