"""A server in this process: the loop in a thread, the engine behind a clock, and no HTTP between."""

from __future__ import annotations

import gc
import os
import queue
import time

from rota.core.adapter import Adapter
from rota.core.events import AdapterAdded, AdapterRefused, Event
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath
from rota.core.messages import AddAdapter
from rota.llm.config import build_device, engine_config, with_first
from rota.runtime.in_process import InProcessService
from rota.workload.scenario import Scenario

from .client import ServiceClient
from .server import Asked, Outcome, peak_rss_gb
from .timed import Timed

TIMEOUT_S = 300.0


class InProcessServer:
    """Notes the steps and events of the run under way; both begin anew with the next."""

    via = "in-process"

    def __init__(self, asked: Asked, watch: type[Timed] = Timed) -> None:
        started_at = time.monotonic()
        config = engine_config({"model_path": str(asked.model), **asked.options}, quiet=True)
        config = with_first(config, [LoraPath(name=name, path=str(path)) for name, path in asked.adapters.items()])
        self.events: list[Event] = []
        self._asked = asked
        self._timed: Timed | None = None
        self._client: ServiceClient | None = None

        def build() -> Timed:
            self._timed = watch(build_device(config))
            return self._timed

        self._service = InProcessService(build, config)
        self._service.start(self._deliver)
        self._service.wait_until_ready()
        self._add_adapters()
        self.start_s = time.monotonic() - started_at

    @property
    def timed(self) -> Timed:
        assert self._timed is not None
        return self._timed

    def run(self, scenario: Scenario, seed: int, limit_s: float) -> Outcome:
        self.timed.clear()
        self.events.clear()
        asked = self._asked
        self._client = ServiceClient(scenario, seed, self._service.send, asked.vocabulary, asked.folder)
        try:
            self._client.run(limit_s)
            return Outcome(self._client.recorder, dict(self._client.problems))
        finally:
            self._client = None

    def peak_rss_gb(self) -> float:
        return peak_rss_gb(os.getpid())

    def stop(self) -> None:
        """The device's memory is free again afterwards: the next engine takes as much as it finds."""
        self._service.stop()
        del self._service, self._timed
        gc.collect()
        _release_device_memory()

    def _add_adapters(self) -> None:
        self._told: queue.SimpleQueue[AdapterAdded | AdapterRefused] = queue.SimpleQueue()
        for number, (name, path) in enumerate(self._asked.adapters.items(), start=1):
            self._service.send(
                AddAdapter(
                    adapter=Adapter(adapter_id=AdapterId(number), name=name, path=str(path)), at=time.monotonic()
                )
            )
            answer = self._told.get(timeout=TIMEOUT_S)
            if isinstance(answer, AdapterRefused):
                raise RuntimeError(answer.reason)

    def _deliver(self, events: list[Event]) -> None:
        self.events.extend(events)
        if self._client is not None:
            self._client.deliver(events)
            return
        for event in events:
            if isinstance(event, AdapterAdded | AdapterRefused):
                self._told.put(event)


def _release_device_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
