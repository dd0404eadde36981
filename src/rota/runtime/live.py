"""The live world: the wall clock, an inbox that can be waited on, and a device."""

from __future__ import annotations

import math
import threading
import time
from typing import Generic, Protocol

from rota.core.messages import AbortAll, Message
from rota.core.plan import StepPlan, StepResult
from rota.runtime.world import Device, Ticket


class Inbox(Protocol):
    """Where messages wait for the loop; a thread's queue, a socket, or a list."""

    def take(self, wait_s: float) -> list[Message] | None:
        """Everything that came; waits up to `wait_s` for the first. None: closed, and nothing is left."""
        ...

    def post(self, message: Message) -> None:
        """Put a message in, from any thread: the device tells of its adapters this way."""
        ...


class LiveWorld(Generic[Ticket]):
    """Ends with its inbox: a closed one aborts whoever is still open, since nobody could read the answers."""

    def __init__(self, device: Device[Ticket], inbox: Inbox) -> None:
        self._device = device
        self._inbox = inbox
        self._is_closed = False
        device.listen(inbox.post)

    def now(self) -> float:
        return time.monotonic()

    def receive(self, until: float) -> list[Message] | None:
        if self._is_closed:
            # Steps in flight are still to be collected; only who would wait for ever hears that none comes.
            return None if until == math.inf else []
        messages = self._inbox.take(max(0.0, until - self.now()))
        if messages is None:
            self._is_closed = True
            return [AbortAll(self.now())]
        return messages

    def submit(self, plan: StepPlan) -> Ticket:
        return self._device.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._device.collect(ticket)


class ThreadInbox:
    """An inbox that other threads of this process put messages into."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._is_closed = False

    def post(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def close(self) -> None:
        """Nothing will be put any more; what is in it is still taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self, wait_s: float) -> list[Message] | None:
        with self._changed:
            if wait_s > 0.0:
                timeout_s = None if wait_s == math.inf else wait_s
                self._changed.wait_for(lambda: self._messages or self._is_closed, timeout_s)
            messages, self._messages = self._messages, []
            return None if self._is_closed and not messages else messages
