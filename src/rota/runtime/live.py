"""The live world is the wall clock, an inbox and a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol

from rota.core.adapter import Adapter
from rota.core.grammar import Grammar
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, AbortAll, AddAdapter, Message, RemoveAdapter
from rota.core.plan import StepPlan, StepResult
from rota.core.request import Request
from rota.runtime.heartbeat import BEAT_S, Heartbeat
from rota.runtime.world import Device, Ticket

# ── preparation ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Requests wait outside the scheduler until their grammars are ready: a slow grammar makes nobody else late.

# True: the function is called once the grammar is ready, from any thread. False: it is ready.
Prepare = Callable[[Grammar, Callable[[], None]], bool]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The grammar of a request that was held back is ready. The scheduler does not hear of it."""

    request_id: RequestId


class Preparation:
    """For the loop's thread. A request keeps the time of its arrival, so it keeps its place."""

    def __init__(self, prepare: Prepare, post: Callable[[Any], None]) -> None:
        self._prepare = prepare
        self._post = post
        self._held: dict[RequestId, Request] = {}
        # Of adapters that held requests ask for: an adapter leaves after the requests that came before.
        self._removals: list[RemoveAdapter] = []

    def sift(self, messages: Iterable[Message | Prepared]) -> list[Message]:
        """The messages that the scheduler shall hear now."""
        return [heard for message in messages for heard in self._heard(message)]

    def _heard(self, message: Message | Prepared) -> Iterable[Message]:
        match message:
            case Prepared(request_id):
                return self._released(request_id)
            case Request(request_id=request_id, sampling=sampling) if sampling.grammar is not None:
                if not self._prepare(sampling.grammar, partial(self._post, Prepared(request_id))):
                    return (message,)
                self._held[request_id] = message
                return ()
            case Abort(request_id):
                # The scheduler must know it first: every request ends with an event.
                return (*self._released(request_id), message)
            case RemoveAdapter(adapter_id=adapter_id, is_forced=False) if adapter_id in self._wanted:
                self._removals.append(message)
                return ()
            case AbortAll():
                held, self._held = self._held, {}
                return (*held.values(), *self._due_removals(), message)
        return (message,)

    def _released(self, request_id: RequestId) -> Iterable[Message]:
        """Nothing if its client has left meanwhile."""
        held = self._held.pop(request_id, None)
        return () if held is None else (held, *self._due_removals())

    def _due_removals(self) -> list[RemoveAdapter]:
        due = [one for one in self._removals if one.adapter_id not in self._wanted]
        self._removals = [one for one in self._removals if one not in due]
        return due

    @property
    def _wanted(self) -> set[AdapterId]:
        return {held.adapter_id for held in self._held.values()}


# ── adapter checks ──────────────────────────────────────────────────────────────────────────────────────────────────
# Adapters that are read later are checked before the scheduler hears of them, many at a time.

# A check waits for a disk more than it computes: a network disk answers in some milliseconds.
THREADS = 8
# Headers are small; a disk that has not given them after this time has failed.
TIMEOUT_S = 120.0
# Checks that a start waits for: a third of a millisecond each, and more with a network disk.
MOST_CHECKED = 500


class AdapterChecks:
    """For the loop's thread, which waits for the checks: they come at a start, before anything is served.

    An adapter that a former engine had is not checked: a bad one must not hold up a restart, and is found when it is
    read. So are the adapters beyond the first hundreds, of which a start would take many seconds.
    """

    def __init__(self, check: Callable[[Adapter], str], timeout_s: float = TIMEOUT_S, most: int = MOST_CHECKED) -> None:
        self._check = check
        self._timeout_s = timeout_s
        self._left = most

    def sift(self, messages: list[Message]) -> list[Message]:
        """The same messages; those of bad adapters say why they are refused."""
        unchecked = [one.adapter for one in messages if isinstance(one, AddAdapter) and _is_unchecked(one)]
        if not unchecked:
            return messages  # nearly every call
        refusals = self._refusals(unchecked[: self._left])
        self._left -= min(self._left, len(unchecked))
        return [_judged(message, refusals) for message in messages]

    def _refusals(self, adapters: Iterable[Adapter]) -> dict[AdapterId, str]:
        pool = ThreadPoolExecutor(THREADS, "adapter-check")
        checks = {adapter.adapter_id: (adapter, pool.submit(self._check, adapter)) for adapter in adapters}
        wait([check for _, check in checks.values()], self._timeout_s)
        pool.shutdown(wait=False, cancel_futures=True)  # a thread that waits for a broken disk may never end
        return {adapter_id: self._said(adapter, check) for adapter_id, (adapter, check) in checks.items()}

    def _said(self, adapter: Adapter, check: Future[str]) -> str:
        if check.done() and not check.cancelled():
            return check.result()
        return f"Adapter '{adapter.name}' could not be read from {adapter.path} within {self._timeout_s:g} seconds."


def _is_unchecked(message: AddAdapter) -> bool:
    return message.is_read_later and not message.is_known and not message.refusal


def _judged(message: Message, refusals: dict[AdapterId, str]) -> Message:
    if isinstance(message, AddAdapter) and (refusal := refusals.get(message.adapter.adapter_id)):
        return replace(message, refusal=refusal)
    return message


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
        self, device: Device[Ticket], inbox: Inbox, heartbeat: Heartbeat | None = None, caller: Caller | None = None
    ) -> None:
        """An inbox whose loop has a caller must wake when the caller rings."""
        self._device = device
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._caller = caller
        self._is_closed = False
        self._checks = AdapterChecks(device.check)
        self._preparation = Preparation(device.prepare, inbox.post)
        self._has_idle_work = True  # until the device says that nothing is left
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
        return self._preparation.sift(self._checks.sift(messages))

    def _wait(self, until: float) -> list[Message] | None:
        """The inbox's messages. A loop with a heartbeat wakes to beat: nothing to do for a long time is no hang."""
        nap_s = math.inf if self._heartbeat is None and self._caller is None else BEAT_S
        while True:
            wait_s = max(0.0, until - self.now())
            if self._heartbeat is not None:
                self._heartbeat.beat()
            messages = self._inbox.take(min(wait_s, QUIET_S if self._has_idle_work else nap_s))
            if messages or messages is None or self._is_wanted(until):
                return messages
            self._has_idle_work = self._has_idle_work and self._device.work_while_idle()

    def _is_wanted(self, until: float) -> bool:
        """Is a pass due, though no message came?"""
        return self.now() >= until or (self._caller is not None and self._caller.is_called())

    def submit(self, plan: StepPlan) -> Ticket:
        if self._heartbeat is not None:
            self._heartbeat.step_begins(plan.prompt_tokens, bool(plan.tokens))
        return self._device.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._device.collect(ticket)
        if self._heartbeat is not None:
            self._heartbeat.step_ended(result.step_s)
        return result
