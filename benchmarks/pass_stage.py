"""A stage for shapes of load: a scheduler beside a device that answers at once; a request that ends is asked again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event, Finished
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.messages import AdapterFetched, AdapterReady, AddAdapter, Message
from rota.core.plan import StepPlan, StepResult
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.core.tenant import SOLE_TENANT, Tenant
from rota.scheduler import Scheduler

STEP_S = 0.02
BLOCK_SIZE = 16
# A token that no shape stops at: answers end by their length.
TOKEN = 7


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request of a shape asks for; when it has ended, the same is asked again."""

    adapter: int = 0
    prompt: int = 64
    output: int = 64
    priority: int = 0
    tenant: str = ""


@dataclass(slots=True)
class Stage:
    """Every step takes as long, and reads and copies of adapters take as many steps as the shape says."""

    scheduler: Scheduler
    read_steps: int = 1
    now: float = 0.0
    steps: int = 0
    asked: dict[RequestId, Ask] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)
    _under_way: deque[tuple[int, Message]] = field(default_factory=deque)

    @classmethod
    def of(
        cls,
        policy: PolicyConfig,
        *,
        rows: int = 256,
        blocks: int = 65_536,
        slots: int = 32,
        on_host: int = 10_000,
        is_caching: bool = False,
        read_steps: int = 1,
        chunk: int = 2048,
    ) -> Stage:
        config = SchedulerConfig(
            max_queued_requests=1_000_000, enable_prefix_caching=is_caching, chunked_prefill_size=chunk
        )
        capacity = Capacity(blocks=blocks, block_size=BLOCK_SIZE, rows=rows, max_sequence_tokens=131_072, slots=slots)
        return cls(Scheduler(config, capacity, policy, LoraConfig(max_loaded_loras=on_host)), read_steps)

    def add(self, adapters: int, pinned: int = 0) -> None:
        """Make adapters known, numbered from 1; the first `pinned` are pinned. All have been read once."""
        for number in range(1, adapters + 1):
            adapter = Adapter(
                adapter_id=AdapterId(number), name=f"adapter{number}", path="", is_pinned=number <= pinned
            )
            self.scheduler.apply(AddAdapter(adapter=adapter, at=self.now))
        while self.step(lambda: None).fetches or self._under_way:
            pass

    def ask(self, ask: Ask) -> None:
        number = next(self._numbers)
        request_id = RequestId(f"r{number:08d}")
        self.asked[request_id] = ask
        tokens = tuple((number * 7919 + i * 31) % 32_003 for i in range(ask.prompt))
        request = Request(
            request_id=request_id,
            prompt=tokens,
            sampling=SamplingParams(max_new_tokens=ask.output),
            arrived_at=self.now + number * 1e-9,
            adapter_id=AdapterId(ask.adapter) if ask.adapter else BASE,
            priority=ask.priority,
            tenant=Tenant(name=ask.tenant) if ask.tenant else SOLE_TENANT,
        )
        self.scheduler.apply(request)

    def step(self, note: Callable[[], Any]) -> StepPlan:
        """One step; `note` is called when its plan begins and when it ends."""
        self.now += STEP_S
        self.steps += 1
        while self._under_way and self._under_way[0][0] <= self.steps:
            self.scheduler.apply(self._under_way.popleft()[1])
        note()
        plan = self.scheduler.plan(self.now)
        note()
        for event in self.scheduler.commit(plan, StepResult(at=self.now, tokens=(TOKEN,) * len(plan.sampled_rows))):
            self._hear(event)
        for load in plan.loads:
            self._under_way.appendleft((self.steps, AdapterReady(load.adapter_id, self.now)))
        for adapter in plan.fetches:
            self._under_way.append(
                (self.steps + self.read_steps, AdapterFetched(adapter_id=adapter.adapter_id, at=self.now))
            )
        return plan

    def _hear(self, event: Event) -> None:
        if isinstance(event, Finished):
            assert event.fault is None, event.fault
            self.ask(self.asked.pop(event.request_id))

    def timed(self, steps: int) -> list[float]:
        """The seconds of a core that each of this many plans took; what other processes take is left out."""
        marks: list[float] = []
        for _ in range(steps):
            self.step(lambda: marks.append(time.thread_time()))
        return [end - start for start, end in zip(marks[::2], marks[1::2], strict=True)]
