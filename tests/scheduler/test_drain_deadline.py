"""A drain's deadline holds under random traffic, whatever lengths the answers turn out to have."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import SchedulerConfig
from rota.core.events import DrainChanged, Event, Finished, Preempted
from rota.core.ids import AdapterId
from rota.core.messages import Message
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policies import SLOT_POLICIES
from rota.policy.slot_policies.drain import Drain
from rota.policy.views import SlotsView
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import VirtualWorld
from tests.builders import add_adapter, capacity, submit
from tests.costs import constant_cost
from tests.scheduler.balance import check_balance

STEP_S = 0.02
ADAPTERS = 5
LIMIT = 300
# One copy is made at a time, so a resident may wait a step or two for the copies before its successor's own.
MOST_LATE_STEPS = 3


class Watched(Drain):
    """Checks in every pass that no resident is still there after its drain should have ended."""

    def observe(self, slots: SlotsView, now: float) -> None:
        super().observe(slots, now)
        for resident in slots.residents:
            if drain := self._drains.get(resident.adapter_id):
                has_old = resident.seated_in <= drain.first_step
                assert resident.steps <= (drain.deadline if has_old else drain.last_step) + MOST_LATE_STEPS


@st.composite
def asked(draw: st.DrawFn) -> tuple[float, Message]:
    """Clients ask for 300 tokens. Most answers end soon, some do not end at all."""
    at = draw(st.integers(0, 150)) * STEP_S
    length = draw(st.sampled_from([2, 5, 5, 5, 12, 40, LIMIT]))
    adapter = draw(st.integers(1, ADAPTERS))
    prompt = draw(st.sampled_from([3, 70]))
    stop = frozenset({length}) if length < LIMIT else frozenset({LIMIT + 1})
    id = f"r{draw(st.integers(0, 10**9))}"
    return at, submit(
        id, adapter=AdapterId(adapter), prompt=prompt, max_new_tokens=LIMIT, stop_token_ids=stop, arrived_at=at
    )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(asked(), min_size=5, max_size=40, unique_by=lambda one: one[1].request_id),
    st.integers(1, 3),
    st.sampled_from([0.05, 0.3, 1.0]),
    st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.6 * STEP_S, 1.7 * STEP_S]),
)
def test_the_beneficiary_of_a_drain_gets_its_slot_within_the_deadline_and_three_steps(
    asks, slots, threshold_s, depth, load_s
):
    config = SchedulerConfig(chunked_prefill_size=64, overlap_depth=depth)
    policy = PolicyConfig(lora_policy="watched", lora_drain_wait_threshold=threshold_s)
    events: list[Event] = []
    with patch.dict(SLOT_POLICIES, watched=Watched.from_config):
        scheduler = Scheduler(config, capacity(blocks=2000, rows=48, slots=slots), policy)
        world = VirtualWorld(
            [*((0.0, add_adapter(number)) for number in range(1, ADAPTERS + 1)), *asks],
            constant_cost(seconds=STEP_S, load_s=load_s),
        )
        run(scheduler, world, events.extend, depth)

    check_balance(scheduler)
    assert sum(isinstance(event, Finished) for event in events) == len(asks)
    assert not any(isinstance(event, Preempted) for event in events)
    states = [event.state for event in events if isinstance(event, DrainChanged)]
    assert states.count("started") == states.count("finished") + states.count("called_off")
