"""A world in which adapters cannot always be read or copied."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rota.core.events import AdapterRefused, AdapterRemoved, Event
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.core.plan import NO_TOKEN, StepPlan, StepResult
from rota.core.request import Request
from rota.sim.world import Finish
from tests.fakes import FakeDevice
from tests.worlds import STEP_S, DeviceWorld

Failure = tuple[str, int, int]  # ("fetch" or "load", adapter, which attempt)


class UnreliableWorld(DeviceWorld):
    """Some fetches and loads fail. Keeps its own account of host memory and objects to orders that do not fit it.

    A step that uses an adapter whose copy fails gives no token for its rows, and the failure is told at once.
    """

    def __init__(
        self,
        messages: Iterable[tuple[float, Message]],
        device: FakeDevice,
        failures: set[Failure],
        host_adapters: int,
        depth: int,
        load_s: float,
        fetch_s: float = 3.7 * STEP_S,  # slow: much can happen meanwhile
        sizes: dict[int, int] | None = None,
    ) -> None:
        """`sizes` are what adapters take: pages, or matrices if the device has places for these."""
        super().__init__(messages, device, depth, load_s, fetch_s, pages_of=sizes.__getitem__ if sizes else None)
        self.known: dict[AdapterId, int] = {}  # the sizes of adapters that were read and not refused or removed since
        self.held: set[AdapterId] = set()
        self.asked: set[RequestId] = set()
        self._failures = failures
        self._host_adapters = host_adapters
        self._attempts: Counter[tuple[str, AdapterId]] = Counter()
        self._fetching: set[AdapterId] = set()
        self._copying: Counter[AdapterId] = Counter()
        self._failing: dict[AdapterId, AdapterFailed] = {}  # copies under way
        self._lost: list[set[int]] = []  # positions among the tokens of each step under way

    def submit(self, plan: StepPlan) -> Finish:
        drops = set(plan.drops)
        assert drops <= self.held, "dropped what is not there"
        # A copy that a step may wait for keeps its host memory until it is complete.
        assert self._is_eager or not drops & self._copying.keys(), "dropped what is being copied"
        self.held -= drops
        fetches = {adapter.adapter_id for adapter in plan.fetches}
        assert not fetches & (self.held | self._fetching), "fetched what is there or on its way"
        self._fetching |= fetches
        assert len(self.held | self._fetching) <= self._host_adapters, "more in host memory than there may be"
        for load in plan.loads:
            assert load.adapter_id in self.held, "loaded what is not in host memory"
            assert self._is_eager or load.adapter_id not in self._copying, "loaded twice at a time"
            if not load.is_awaited:
                self._copying[load.adapter_id] += 1
        failed = self.used(plan) & self._failing.keys()
        for adapter_id in failed:
            self._tell_now(self._failing.pop(adapter_id))
        rows = enumerate(plan.sampled_rows)
        self._lost.append({position for position, row in rows if self._adapter_of[row] in failed})
        return super().submit(plan)

    def collect(self, ticket: Finish) -> StepResult:
        result, lost = super().collect(ticket), self._lost.pop(0)
        tokens = tuple(NO_TOKEN if at in lost else token for at, token in enumerate(result.tokens))
        return replace(result, tokens=tokens)

    def _tell_now(self, failure: AdapterFailed) -> None:
        """The message of a copy goes before the step that waits for the copy."""
        self._heap = [entry for entry in self._heap if entry[2] is not failure]
        heapq.heapify(self._heap)
        super().post(self._now, failure)

    def post(self, at: float, message: Message) -> None:
        if isinstance(message, AdapterFetched | AdapterReady):
            kind = "fetch" if isinstance(message, AdapterFetched) else "load"
            self._attempts[kind, message.adapter_id] += 1
            if (kind, message.adapter_id, self._attempts[kind, message.adapter_id]) in self._failures:
                message = AdapterFailed(adapter_id=message.adapter_id, at=at, reason=f"its {kind} failed")
                if kind == "load":
                    self._failing[message.adapter_id] = message
        super().post(at, message)

    def receive(self, until: float) -> list[Message] | None:
        messages = super().receive(until)
        for message in messages or []:
            if isinstance(message, Request):
                self.asked.add(message.request_id)
            if isinstance(message, AdapterFetched):
                self.held.add(message.adapter_id)
            if isinstance(message, AdapterFetched | AdapterReady | AdapterFailed):
                self._fetching.discard(message.adapter_id)
            if isinstance(message, AdapterReady | AdapterFailed):
                self._copying = Counter(
                    {one: copies for one, copies in self._copying.items() if one != message.adapter_id}
                )
            if isinstance(message, AdapterFailed):
                self._failing.pop(message.adapter_id, None)
        return None if messages is None else [self._noted(message) for message in messages]

    def _noted(self, message: Message) -> Message:
        if not isinstance(message, AdapterFetched):
            return message
        self.known[message.adapter_id] = message.pages
        return replace(message, pages=0, matrices=message.pages) if self.device.capacity.matrices else message

    def hear(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AdapterRefused | AdapterRemoved):
                self.known.pop(event.adapter_id, None)
