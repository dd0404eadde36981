"""The live world is the wall clock, an inbox and a device."""

from __future__ import annotations

import math
import threading
import time
from typing import Generic, Protocol

from rota.core.messages import AbortAll, Message
from rota.core.plan import StepPlan, StepResult
from rota.runtime.adapter_checks import AdapterChecks
from rota.runtime.preparation import Preparation
from rota.runtime.pulse import BEAT_S, Pulse
from rota.runtime.world import ChecksAdapters, Device, FollowsGrammars, Ticket, WorksWhileIdle

# A loop without messages for so long is idle.
QUIET_S = 0.02


class Inbox(Protocol):
    """Holds messages for the loop: a queue between threads, a socket, or a list."""

    def take(self, wait_s: float) -> list[Message] | None:
        """All messages; waits up to `wait_s` for the first. None: the inbox is closed and empty."""
        ...

    def post(self, message: Message) -> None:
        """Add a message, from any thread: the device reports its adapters this way."""
        ...


class Caller(Protocol):
    """Another process may want a pass of this loop, though no message comes."""

    def is_called(self) -> bool: ...


class LiveWorld(Generic[Ticket]):
    """Ends with its inbox: when the inbox closes, open requests are aborted, since no client could read the answers."""

    def __init__(
        self, device: Device[Ticket], inbox: Inbox, pulse: Pulse | None = None, caller: Caller | None = None
    ) -> None:
        """An inbox whose loop has a caller must wake when the caller rings."""
        self._device = device
        self._inbox = inbox
        self._pulse = pulse
        self._caller = caller
        self._is_closed = False
        self._checks = AdapterChecks(device.check) if isinstance(device, ChecksAdapters) else None
        self._preparation = Preparation(device.prepare, inbox.post) if isinstance(device, FollowsGrammars) else None
        self._idle_work = device.work_while_idle if isinstance(device, WorksWhileIdle) else None
        device.listen(inbox.post)

    def now(self) -> float:
        return time.monotonic()

    def receive(self, until: float) -> list[Message] | None:
        if self._is_closed:
            # Steps in flight are still to be collected. Only a wait without end is told that nothing comes.
            return None if until == math.inf else []
        messages = self._wait(until)
        if messages is None:
            self._is_closed = True
            messages = [AbortAll(self.now())]
        if self._checks is not None:
            messages = self._checks.sift(messages)
        return self._preparation.sift(messages) if self._preparation is not None else messages

    def _wait(self, until: float) -> list[Message] | None:
        """The inbox's messages. A loop with a pulse wakes to beat: nothing to do for a long time is no hang."""
        nap_s = math.inf if self._pulse is None and self._caller is None else BEAT_S
        while True:
            wait_s = max(0.0, until - self.now())
            if self._pulse is not None:
                self._pulse.beat()
            messages = self._inbox.take(min(wait_s, QUIET_S if self._idle_work else nap_s))
            if messages or messages is None or self._is_wanted(until):
                return messages
            if self._idle_work and not self._idle_work():
                self._idle_work = None

    def _is_wanted(self, until: float) -> bool:
        """Is a pass due, though no message came?"""
        return self.now() >= until or (self._caller is not None and self._caller.is_called())

    def submit(self, plan: StepPlan) -> Ticket:
        if self._pulse is not None:
            self._pulse.step_begins(plan.prompt_tokens, bool(plan.tokens))
        return self._device.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._device.collect(ticket)
        if self._pulse is not None:
            self._pulse.step_ended(result.step_s)
        return result


class ThreadInbox:
    """An inbox for messages from other threads of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._is_closed = False

    def post(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def close(self) -> None:
        """No message will follow; messages in the inbox are still taken."""
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
