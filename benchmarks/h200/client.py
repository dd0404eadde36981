"""A client of a service in this process: asks what a scenario says, when it says so, and notes what comes back."""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rota.core.adapter import Adapter
from rota.core.events import Event, Finished
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter, Message, RemoveAdapter
from rota.core.request import Request, SamplingParams
from rota.observe.summary import Recorder
from rota.workload.arrivals import Arrival, Visit, asks, visits
from rota.workload.scenario import Scenario

# A moment to make the first prompts in.
AHEAD_S = 0.05
FIRST_TRANSIENT = 1_000_000  # beyond all adapters' ids


@dataclass(slots=True)
class ServiceClient:
    """Runs once. `send` takes messages to the service; whoever gets its events hands them to `deliver`."""

    scenario: Scenario
    seed: int
    send: Callable[[Message], None]
    vocabulary: int
    folder: Path  # of adapters, where transients are copied from
    recorder: Recorder = field(default_factory=Recorder)
    problems: Counter[str] = field(default_factory=Counter)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _ended: queue.SimpleQueue[RequestId] = field(default_factory=queue.SimpleQueue)
    _open: dict[RequestId, str] = field(default_factory=dict)  # and whose they are
    _waves: dict[str, Iterator[Arrival]] = field(default_factory=dict)  # what those who ask one after another ask next

    def deliver(self, events: list[Event]) -> None:
        """From the service's thread."""
        self.recorder.observe(events)
        for event in events:
            if isinstance(event, Finished):
                self._ended.put(event.request_id)
                if event.fault:
                    self.problems[event.fault.message] += 1

    def run(self, limit_s: float) -> None:
        """Blocks until all have been answered; raises TimeoutError if they are not within `limit_s`."""
        started_at = time.monotonic() + AHEAD_S
        for number, client in enumerate(self.scenario.clients):
            # The simulator's seeds, so that both worlds see the same requests.
            wave = asks(client, self.seed * 1000 + number)
            if client.concurrency is not None:
                self._waves[str(number)] = wave
            for ask in itertools.islice(wave, client.concurrency):
                self._at(started_at + ask.at, partial(self._ask, str(number), ask))
        for visit in visits(self.scenario, self.seed):
            self._at(started_at + visit.at, partial(self._welcome, visit))
        self._serve_out(started_at + limit_s)

    def _serve_out(self, deadline: float) -> None:
        while True:
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            if not self._due and not self._open:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._open)} requests are open when time is up.")
            next_at = self._due[0][0] if self._due else deadline + 0.1
            self._wait(max(0.0, next_at - time.monotonic()))

    def _wait(self, wait_s: float) -> None:
        """Sleep until something has ended; who asks one question after another then asks the next."""
        try:
            client = self._open.pop(self._ended.get(timeout=wait_s))
        except queue.Empty:
            return
        for ask in itertools.islice(self._waves.get(client, ()), 1):
            self._ask(client, ask)

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at, next(self._order), act))

    def _ask(self, client: str, ask: Arrival, counts_as: AdapterId | None = None) -> None:
        request_id = RequestId(f"{client}-{ask.number:07d}")
        sampling = SamplingParams(max_new_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True)
        first = ask.number * 97 % (self.vocabulary - ask.prompt_tokens)
        prompt = tuple(range(first, first + ask.prompt_tokens))
        now = time.monotonic()
        self._open[request_id] = client
        self.recorder.asked(request_id, ask.adapter_id if counts_as is None else counts_as, now)
        self.send(
            Request(request_id=request_id, prompt=prompt, sampling=sampling, arrived_at=now, adapter_id=ask.adapter_id)
        )
        if ask.leaves_after_s is not None:
            self._at(now + ask.leaves_after_s, partial(self._leave, request_id))

    def _leave(self, request_id: RequestId) -> None:
        if request_id in self._open:
            self.send(Abort(request_id, time.monotonic()))

    def _welcome(self, visit: Visit) -> None:
        """A transient is loaded, asked at once, and told to go; all transients are counted together."""
        now, transient = time.monotonic(), AdapterId(FIRST_TRANSIENT + visit.number)
        path = self.folder / f"adapter{visit.host}"
        self.send(
            AddAdapter(adapter=Adapter(adapter_id=transient, name=f"transient{visit.number}", path=str(path)), at=now)
        )
        everybody = AdapterId(self.scenario.adapters + 1)
        self.recorder.transients.add(everybody)
        (ask,) = visit.asks
        self._ask("transient", replace(ask, adapter_id=transient), everybody)
        self._at(now + visit.stays_s, lambda: self.send(RemoveAdapter(adapter_id=transient, at=time.monotonic())))
