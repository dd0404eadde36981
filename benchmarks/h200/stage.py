"""A stage is an engine and its books in the calling thread, on which requests that are all known run at full speed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

from rota.core.adapter import Adapter
from rota.core.config import EngineConfig
from rota.core.events import AdapterAdded, AdapterRefused, Event, Finished, SlotChanged, SlotState
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request, SamplingParams
from rota.engine.build import build_engine
from rota.engine.engine import Engine
from rota.runtime.doorbell import Doorbell
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from tests.offline import OfflineInbox

from .timed import Step, Timed


class Stage:
    """Several stages may share an engine, one after the other, as long as their adapters have different ids."""

    def __init__(self, config: EngineConfig, engine: Engine | None = None) -> None:
        started_at = time.monotonic()
        self.engine = engine or build_engine(config)
        self.start_s = time.monotonic() - started_at
        self.device = Timed(self.engine)
        self.scheduler = Scheduler.from_config(config, self.engine.capacity)
        self.events: list[Event] = []
        self.timings: list[dict[str, float]] = []
        self._doorbell = Doorbell()

    def add(self, adapters: Sequence[Adapter]) -> None:
        self._run(OfflineInbox(adapters=adapters, doorbell=self._doorbell))

    def serve(
        self,
        count: int,
        prompt: int,
        output: int,
        adapters: Sequence[AdapterId],
        stagger: int = 0,
        sampling: Callable[[int], SamplingParams] | None = None,
    ) -> list[float]:
        """Seconds of every step that only decodes; with `stagger`, requests are longer one after another.

        `sampling` says how request n is answered; without it all are greedy, and `output` tokens long.
        """
        self.device.steps.clear()
        now, vocabulary = time.monotonic(), self.engine.spec.vocab_size
        asked = [
            Request(
                request_id=RequestId(f"r{number}"),
                prompt=tuple((number * 7919 + i * 31) % vocabulary for i in range(prompt)),
                sampling=sampling(number)
                if sampling
                else SamplingParams(max_new_tokens=output + number * stagger, temperature=0.0),
                arrived_at=now + number * 1e-6,
                adapter_id=adapters[number % len(adapters)],
            )
            for number in range(count)
        ]
        self._run(OfflineInbox(asked, 1000, doorbell=self._doorbell))
        self.timings += [step.timing for step in self.device.steps[1:]]
        return [step.seconds for step in steady(self.device.steps, count)]

    def _run(self, inbox: OfflineInbox) -> None:
        self.events.clear()

        def emit(events: list[Event]) -> None:
            self.events.extend(events)
            for event in events:
                if isinstance(event, Finished):
                    assert event.fault is None, event.fault
                    inbox.note_ended(event.request_id)
                elif isinstance(event, AdapterAdded | AdapterRefused):
                    assert isinstance(event, AdapterAdded), event
                    inbox.note_ended(event.adapter_id)

        run(self.scheduler, LiveWorld(self.device, inbox), emit, depth=2)


def steady(steps: Sequence[Step], decodes: int) -> list[Step]:
    """Steps in which all decode and nobody's prompt is computed, nor was in the step before."""
    return [
        step
        for before, step in itertools.pairwise(steps)
        if step.decodes == decodes and not step.prompt_tokens and not before.prompt_tokens
    ]


def load_spans(events: Sequence[Event]) -> list[tuple[float, float]]:
    """When each adapter that was loaded began to be and when it was, from the order to the message."""
    begun: dict[AdapterId, float] = {}
    spans: list[tuple[float, float]] = []
    for event in events:
        if isinstance(event, SlotChanged) and event.state is SlotState.LOADING:
            begun[event.adapter_id] = event.at
        elif isinstance(event, SlotChanged) and event.state is SlotState.READY and event.adapter_id in begun:
            spans.append((begun.pop(event.adapter_id), event.at))
    return spans


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(statistics.median(ordered) * 1e3, 3),
        "p99": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
        "max": round(ordered[-1] * 1e3, 3),
    }
