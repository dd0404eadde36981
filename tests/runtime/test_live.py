from __future__ import annotations

import math
import threading

import pytest
import zmq

from rota.core.config import SchedulerConfig
from rota.core.events import Event, FinishReason
from rota.core.messages import AbortAll, Message
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.wire import SocketInbox, Stop, encode, open_socket
from rota.scheduler import Scheduler
from tests.builders import abort, submit
from tests.fakes import FakeDevice, continuation, endings, outputs
from tests.in_process import ThreadInbox


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
