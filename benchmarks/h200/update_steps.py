"""Steps beside updates, by the clock of the engine's own loop: the engine is in this process, without HTTP."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rota.core.adapter import Adapter
from rota.core.events import AdapterAdded, AdapterRefused, Event, Finished
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter, RemoveAdapter
from rota.core.request import Request, SamplingParams
from rota.llm.config import build_device, engine_config
from rota.runtime.in_process import InProcessService
from rota.runtime.process import SWITCH_S

from .server import Asked
from .stage import milliseconds, steady
from .timed import Timed

LIMIT_S = 120.0
PAUSE_S = 0.1
USED = 6
SETTLING = 3
# Steps before and behind one with which it is compared.
NEIGHBOURS = 40


class Engine:
    """A service in this process whose events can be waited for."""

    def __init__(self, asked: Asked) -> None:
        config = engine_config({"model_path": str(asked.model), **asked.options}, quiet=True)
        sys.setswitchinterval(SWITCH_S)  # as an engine's own process does
        self.timed: Timed | None = None
        self._said: dict[object, Event] = {}
        self._changed = threading.Condition()
        self.service = InProcessService(lambda: self._build(config), config)
        self.service.start(self._deliver)
        self.service.wait_until_ready()

    def add(self, number: int, path: Path, former: int | None = None) -> tuple[float, float]:
        """From the order until an adapter counts as added."""
        adapter = Adapter(adapter_id=AdapterId(number), name=f"a{number}", path=str(path), version=number)
        begun_at = time.monotonic()
        self.service.send(
            AddAdapter(adapter=adapter, at=begun_at, former=None if former is None else AdapterId(former))
        )
        answer = self._wait(AdapterId(number))
        assert isinstance(answer, AdapterAdded), answer
        return begun_at, time.monotonic()

    def ask(self, number: int, adapter: int, tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=RequestId(f"r{number}"),
            prompt=(number + 1, 2, 3),
            sampling=sampling,
            arrived_at=time.monotonic(),
            adapter_id=AdapterId(adapter),
        )
        self.service.send(request)

    def leave(self, count: int) -> None:
        for number in range(count):
            self.service.send(Abort(RequestId(f"r{number}"), time.monotonic()))
        for number in range(count):
            self._wait(f"r{number}")

    def _build(self, config: Any) -> Timed:
        self.timed = Timed(build_device(config))
        return self.timed

    def _deliver(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                if isinstance(event, AdapterAdded | AdapterRefused):
                    self._said[event.adapter_id] = event
                elif isinstance(event, Finished):
                    self._said[event.request_id] = event
            self._changed.notify_all()

    def _wait(self, what: object) -> Event:
        with self._changed:
            assert self._changed.wait_for(lambda: what in self._said, LIMIT_S), f"no word of {what}"
            return self._said.pop(what)


def update_steps(asked: Asked, place: Path, decodes: int, rounds: int, limit_s: float) -> dict[str, Any]:
    """Decodes of six adapters, and a seventh that gets versions; `place` holds two folders of it."""
    engine = Engine(asked)
    try:
        for number, path in enumerate(list(asked.adapters.values())[:USED], start=1):
            engine.add(number, path)
        engine.add(USED + 1, place / "0")
        # The longest that the model allows: none must end before the measurement does.
        tokens = engine.service.wait_until_ready().max_sequence_tokens - 8
        for number in range(decodes):
            engine.ask(number, number % USED + 1, tokens)
        time.sleep(min(2.0, limit_s))  # prompts are computed before anything is timed
        # The first versions pin memory, which later ones take over.
        spans = _update(engine, place, SETTLING + rounds, time.monotonic() + limit_s)[SETTLING:]
        engine.leave(decodes)
        assert engine.timed is not None
        return _told(engine.timed, decodes, spans)
    finally:
        engine.service.stop()


def _update(engine: Engine, place: Path, rounds: int, ends_at: float) -> list[tuple[float, float]]:
    spans, version = [], USED + 1
    for number in range(rounds):
        if time.monotonic() > ends_at:
            break
        version += 1
        spans.append(engine.add(version, place / str(number % 2), former=version - 1))
        engine.service.send(RemoveAdapter(adapter_id=AdapterId(version - 1), at=time.monotonic(), takes_requests=True))
        time.sleep(PAUSE_S)  # so that the next update finds an engine at rest
    return spans


def _told(timed: Timed, decodes: int, spans: list[tuple[float, float]]) -> dict[str, Any]:
    steps = steady(timed.steps, decodes)
    meets = [any(begin < step.ended_at and step.began_at < end for begin, end in spans) for step in steps]
    seconds = [step.seconds for step in steps]
    by_neighbours = compared(seconds, meets)
    beside, apart = (
        [one for one, is_met in zip(seconds, meets, strict=True) if is_met is kind] for kind in (True, False)
    )
    found: dict[str, Any] = {
        "updates": len(spans),
        "update_ms": milliseconds([end - begin for begin, end in spans]),
        "steps_beside": len(beside),
        "steps_apart": len(apart),
    }
    for kind, word in ((True, "beside"), (False, "apart")):
        ratios = sorted(ratio for ratio, is_met in zip(by_neighbours, meets, strict=True) if is_met is kind)
        if ratios:
            found[f"step_ms_{word}"] = milliseconds(beside if kind else apart)
            found[f"{word}_by_neighbours"] = {
                "median": round(statistics.median(ratios), 3),
                "p99": round(ratios[int(len(ratios) * 0.99)], 3),
                "max": round(ratios[-1], 3),
                "share_above_1.1": round(sum(ratio > 1.1 for ratio in ratios) / len(ratios), 4),
            }
    return found


def compared(seconds: Sequence[float], meets: Sequence[bool]) -> list[float]:
    """Each step over the median of those around it that ran without an update: steps grow with their contexts."""
    ratios = []
    for index, one in enumerate(seconds):
        around = range(max(0, index - NEIGHBOURS), min(len(seconds), index + NEIGHBOURS + 1))
        alone = [seconds[other] for other in around if not meets[other]]
        ratios.append(one / statistics.median(alone) if alone else 1.0)
    return ratios
