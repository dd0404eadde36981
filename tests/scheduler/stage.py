"""A stage on which a test plays the world: nothing arrives and no time passes unless it says so."""

from __future__ import annotations

from typing import Any

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event
from rota.core.ids import FIRST_ENGINE, AdapterId, EngineId, RequestId
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message, RemoveAdapter
from rota.core.plan import StepPlan, StepResult
from rota.core.policy_config import PolicyConfig
from rota.scheduler import Scheduler
from tests.builders import abort, add_adapter, capacity, submit
from tests.scheduler.balance import check_balance

WAIT = PolicyConfig(lora_policy="wait")


class Stage:
    """A scheduler that knows `adapters`, numbered from 1, all in host memory and none in a slot.

    `sizes` are the pages that they take, if slots share pages.
    """

    def __init__(
        self,
        adapters: int = 3,
        policy: PolicyConfig = WAIT,
        lora: LoraConfig | None = None,
        config: SchedulerConfig | None = None,
        pinned: tuple[int, ...] = (),
        engine_id: EngineId = FIRST_ENGINE,
        sizes: tuple[int, ...] = (),
        **found: Any,
    ) -> None:
        self.scheduler = Scheduler(config or SchedulerConfig(), capacity(**found), policy, lora, engine_id)
        self.events: list[Event] = []
        self.now = 0.0
        for number in range(1, adapters + 1):
            self.tell(add_adapter(number, is_pinned=number in pinned))
        for adapter in self.step().fetches:
            self.read(adapter.adapter_id, sizes[adapter.adapter_id - 1] if sizes else 0)

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────

    def tell(self, message: Message) -> None:
        self.scheduler.apply(message)
        check_balance(self.scheduler)

    def ask(self, id: str, adapter: int = 0, at: float | None = None, **fields: Any) -> None:
        self.tell(submit(id, adapter=AdapterId(adapter), arrived_at=self.now if at is None else at, **fields))

    def leave(self, id: str) -> None:
        self.tell(abort(id, self.now))

    def read(self, adapter: int, pages: int = 0) -> None:
        """An adapter lies in host memory, and takes so many pages in a slot."""
        self.tell(AdapterFetched(adapter_id=AdapterId(adapter), at=self.now, pages=pages))

    def arrive(self, *adapters: int, copy_s: float = 0.0) -> None:
        """Their copies into slots are complete; without a time no step uses a slot before it hears of its copy."""
        for adapter in adapters:
            self.tell(AdapterReady(AdapterId(adapter), self.now, copy_s))

    def fail(self, adapter: int, reason: str = "it is broken") -> None:
        self.tell(AdapterFailed(adapter_id=AdapterId(adapter), at=self.now, reason=reason))

    def unload(self, adapter: int, is_forced: bool = False) -> None:
        self.tell(RemoveAdapter(adapter_id=AdapterId(adapter), at=self.now, is_forced=is_forced))

    def step(self, at: float | None = None, token: int = 7) -> StepPlan:
        """One step from plan to tokens, at a moment that stays the present one."""
        self.now = self.now if at is None else at
        plan = self.scheduler.plan(self.now)
        self.finish(plan, token)
        return plan

    def finish(self, plan: StepPlan, token: int = 7) -> None:
        """The device is done with a step."""
        result = StepResult(at=self.now, tokens=(token,) * len(plan.sampled_rows))
        self.events += self.scheduler.commit(plan, result)
        check_balance(self.scheduler)

    def seat(self, *adapters: int, **fields: Any) -> None:
        """Let one request of each adapter run, in slots that are empty."""
        for adapter in adapters:
            self.ask(f"runs{adapter}", adapter, **{"max_new_tokens": 400, **fields})
        self.step()
        self.arrive(*adapters)
        plan = self.step()
        assert len(plan.seats) == len(adapters)

    # ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────────

    def said(self, kind: type[Event]) -> list[Any]:
        """The events of one kind so far, taken off the list."""
        said = [event for event in self.events if isinstance(event, kind)]
        self.events = [event for event in self.events if not isinstance(event, kind)]
        return said

    def why(self, id: str) -> str:
        refusal = self.scheduler.explain(RequestId(id))
        assert refusal is not None, f"{id} does not wait"
        return refusal.reason


def loads(plan: StepPlan) -> list[int]:
    return [load.adapter_id for load in plan.loads]


def seated(plan: StepPlan) -> list[str]:
    return [seat.request_id for seat in plan.seats]
