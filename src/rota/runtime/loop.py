"""The only loop: receive, plan, submit, collect, commit, emit, in any world."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rota.core.errors import StuckError
from rota.core.events import Event
from rota.core.plan import StepPlan, StepResult
from rota.runtime.world import Ticket, World
from rota.scheduler import Scheduler

# A scheduler that asks this often in a row to be called again at once, without work, is stuck.
MOST_IDLE_PASSES = 1000

Emit = Callable[[list[Event]], None]


def run(scheduler: Scheduler, world: World[Ticket], emit: Emit, depth: int = 2) -> None:
    """Serve until no message will ever come and no request waits.

    With depth 2 the next step is planned and queued while the device runs this one:

        device   | step 1 | step 2 | step 3 |
        here     p1 p2    c1 p3    c2 p4             p: plan and submit, c: collect and commit
    """
    in_flight: deque[tuple[StepPlan, Ticket]] = deque()
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
            # An engine may die of what it reads or serves: who watches it hears first what that is.
            _emit(emit, scheduler.take_events())
            in_flight.append((plan, world.submit(plan)))
        else:
            # A plan without work is done at once; its commit gives the events of refused and aborted requests.
            _emit(emit, scheduler.commit(plan, StepResult(at=world.now())))

        if not in_flight:
            idle_passes = 0 if messages or plan.wake_at > world.now() else idle_passes + 1
            if idle_passes > MOST_IDLE_PASSES:
                raise StuckError(_explain(scheduler))
            wake_at = plan.wake_at
            continue
        if len(in_flight) >= depth or not plan.has_work:
            _emit(emit, scheduler.take_events())  # a client that waits for an adapter need not wait for a step
            done, ticket = in_flight.popleft()
            _emit(emit, scheduler.commit(done, world.collect(ticket)))
        wake_at = world.now()  # a step was submitted or committed: plan again at once


def _emit(emit: Emit, events: list[Event]) -> None:
    if events:
        emit(events)


def _explain(scheduler: Scheduler) -> str:
    waiting = [f"  {request_id}: {reason}" for request_id, reason in sorted(scheduler.refusals().items())]
    return "\n".join(["Requests wait, but no message and no step will ever help them:", *waiting])
