"""The only loop: receive, plan, submit, collect, commit, emit; in any world."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rota.core.errors import StuckError
from rota.core.events import Event
from rota.core.plan import StepPlan, StepResult
from rota.runtime.world import Ticket, World
from rota.scheduler import Scheduler

# A scheduler that wants to be asked again at once, so often in a row and for nothing, will never get anywhere.
MOST_IDLE_PASSES = 1000

Emit = Callable[[list[Event]], None]


def run(scheduler: Scheduler, world: World[Ticket], emit: Emit, depth: int = 2) -> None:
    """Serve until nothing will ever come and nobody waits.

    With depth 2 the next step is planned and queued while the device runs this one:

        device   | step 1 | step 2 | step 3 |
        here     p1 p2    c1 p3    c2 p4             p: plan and submit, c: collect and commit
    """
    flying: deque[tuple[StepPlan, Ticket]] = deque()
    wake_at, idle_passes = world.now(), 0
    while True:
        messages = world.receive(until=wake_at)
        if messages is None:
            if scheduler.is_idle:
                return
            raise StuckError(_explain(scheduler))
        for message in messages:
            scheduler.apply(message)

        plan = scheduler.plan(world.now())
        if plan.has_work:
            flying.append((plan, world.submit(plan)))
        else:
            # Nothing to do is done at once; the commit lets events of refused and aborted requests out.
            _emit(emit, scheduler.commit(plan, StepResult(at=world.now())))

        if not flying:
            idle_passes = 0 if messages or plan.wake_at > world.now() else idle_passes + 1
            if idle_passes > MOST_IDLE_PASSES:
                raise StuckError(_explain(scheduler))
            wake_at = plan.wake_at
            continue
        if len(flying) >= depth or not plan.has_work:
            done, ticket = flying.popleft()
            _emit(emit, scheduler.commit(done, world.collect(ticket)))
        wake_at = world.now()  # something was done or will be: ask again at once


def _emit(emit: Emit, events: list[Event]) -> None:
    if events:
        emit(events)


def _explain(scheduler: Scheduler) -> str:
    waiting = [f"  {request_id}: {reason}" for request_id, reason in sorted(scheduler.refusals().items())]
    return "\n".join(["Requests wait and nothing will ever come of it:", *waiting])
