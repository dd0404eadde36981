"""What `rotate` promises, kept under random traffic: every adapter has its turn, and pauses stay within a bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import SchedulerConfig
from rota.core.events import Event, Finished, Preempted, Produced
from rota.core.ids import AdapterId
from rota.core.messages import Message
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policies.rotate import STEADY_STEPS
from rota.policy.visits import MOST_VISITS, STALL_STEPS, TURN_STEPS
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import VirtualWorld
from tests.builders import abort, add_adapter, capacity, request, submit
from tests.costs import constant_cost
from tests.scheduler.balance import check_balance

STEP_S = 0.02
LOAD_S = 0.005

Messages = list[tuple[float, Message]]


def serve(messages: Messages, policy: PolicyConfig, slots: int, rows: int = 64, depth: int = 2) -> list[Event]:
    """Through the virtual world, with KV for all requests."""
    found = capacity(blocks=4096, rows=rows, slots=slots, max_sequence_tokens=4096)
    scheduler = Scheduler(SchedulerConfig(enable_prefix_caching=False, overlap_depth=depth), found, policy)
    events: list[Event] = []
    run(scheduler, VirtualWorld(messages, constant_cost(seconds=STEP_S, load_s=LOAD_S)), events.extend, depth)
    check_balance(scheduler)
    return events


def token_times(events: Iterable[Event]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for event in events:
        assert not isinstance(event, Preempted)
        if isinstance(event, Produced):
            for request_id in event.request_ids:
                times.setdefault(request_id, []).append(event.at)
    return times


def longest_gap_s(events: Iterable[Event]) -> float:
    """Between two tokens of one request."""
    every = token_times(events).values()
    return max((later - earlier for one in every for earlier, later in pairwise(one)), default=0.0)


@st.composite
def crowds(draw: st.DrawFn, adapters: int) -> Messages:
    """Every adapter has work. It comes at random moments, and some of it leaves."""
    messages: Messages = []
    for number in range(1, adapters + 1):
        messages.append((0.0, add_adapter(number)))
        for turn in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, 100)) / 50
            length = draw(st.sampled_from([2, 30, 150]))
            asked = request(
                f"r{number}-{turn}", adapter=AdapterId(number), prompt=9, max_new_tokens=length, arrived_at=at
            )
            messages.append((at, replace(asked, priority=draw(st.sampled_from([0, 0, 0, 1, -1])))))
            if draw(st.integers(0, 4)) == 0:
                left_at = at + draw(st.integers(0, 100)) / 50
                messages.append((left_at, abort(asked.request_id, left_at)))
    return messages


@settings(max_examples=40, deadline=None)
@given(data=st.data(), slots=st.integers(1, 4), depth=st.sampled_from([1, 2]))
def test_no_answer_pauses_for_long_while_no_more_adapters_are_parked_than_slots(data, slots, depth):
    """With as many parked adapters as slots, steps of d seconds planned k deep and copies of l seconds, two tokens of a
    sequence that keeps its KV are no further apart than

        (16 + 8) · d + n · (3 · d + c)        where c = l + (k + 1) · d is what a change takes

    After 16 steps without a token a turn is due. Settled adapters that came less than 8 steps ago do not step aside for
    it. Two visits come at a time, each of three steps, and each of the other adapters has at most one turn and one
    visit for a first token before it: n = 2 · adapters / min(2, slots).
    """
    adapters = slots + data.draw(st.integers(1, slots))
    change_s = LOAD_S + (depth + 1) * STEP_S
    visits = 2 * adapters / min(MOST_VISITS, slots)
    bound_s = (STALL_STEPS + STEADY_STEPS) * STEP_S + visits * (TURN_STEPS * STEP_S + change_s)

    events = serve(data.draw(crowds(adapters)), PolicyConfig(), slots, depth=depth)
    assert longest_gap_s(events) <= bound_s


@settings(max_examples=12, deadline=None)
@given(data=st.data(), slots=st.integers(1, 3), more=st.integers(1, 12), rows=st.sampled_from([4, 64]))
def test_every_request_is_answered_though_other_adapters_never_run_out_of_work(data, slots, more, rows):
    """As many busy adapters as slots are asked anew all the time; others are asked once, at any moment of the start."""
    messages: Messages = [(0.0, add_adapter(number)) for number in range(1, slots + more + 1)]
    for number in range(1, slots + 1):
        for turn in range(60):
            at = 0.5 * turn
            busy = submit(f"busy{number}-{turn}", adapter=AdapterId(number), max_new_tokens=40, arrived_at=at)
            messages.append((at, busy))
    for number in range(slots + 1, slots + more + 1):
        at = data.draw(st.integers(0, 40)) / 20
        messages.append((at, submit(f"cold{number}", adapter=AdapterId(number), max_new_tokens=20, arrived_at=at)))

    ends = {
        event.request_id: event.at for event in serve(messages, PolicyConfig(), slots, rows) if type(event) is Finished
    }
    assert all(ends[f"cold{number}"] < 29.5 for number in range(slots + 1, slots + more + 1))


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tokens(
    weights: tuple[float, ...], slots: int, until: float = 17.0, policy: PolicyConfig | None = None
) -> tuple[dict[int, int], list[Event]]:
    """Tokens by adapter between two seconds and `until`, while each has more work than it can get done."""
    messages: Messages = []
    for number, weight in enumerate(weights, 1):
        messages.append((0.0, add_adapter(number, weight=weight)))
        messages += [
            (0.0, submit(f"{number}-{turn}", adapter=AdapterId(number), prompt=9, max_new_tokens=1000))
            for turn in range(4)
        ]
    events = serve(messages, policy or PolicyConfig(), slots)
    times = token_times(events)
    counts = dict.fromkeys(range(1, len(weights) + 1), 0)
    for request_id, moments in times.items():
        counts[int(request_id.split("-")[0])] += sum(2.0 <= at < until for at in moments)
    assert min(event.at for event in events if isinstance(event, Finished)) > until
    return counts, [event for event in events if event.at < until]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_tokens_come_in_the_proportion_of_the_weights(slots):
    """No adapter of weight 4 would need a whole slot: so six adapters on up to three slots can have their shares."""
    weights = (1.0, 2.0, 4.0, 1.0, 2.0, 4.0)
    counts, _ = tokens(weights, slots)
    of_weight_one = sum(counts.values()) / sum(weights)
    for number, weight in enumerate(weights, 1):
        assert counts[number] == pytest.approx(weight * of_weight_one, rel=0.15)


def test_an_adapter_that_would_need_more_than_a_slot_has_one_and_the_others_share_the_rest():
    counts, _ = tokens((1.0, 2.0, 4.0), slots=2)
    assert counts[2] / counts[1] == pytest.approx(2.0, rel=0.15)
    assert counts[3] / counts[1] == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize("heavy", [10.0, 100.0])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_however_heavy_one_adapter_is_the_others_pause_for_a_bounded_time(heavy, slots):
    """Turns come after eight times sixteen steps at the latest."""
    counts, events = tokens((heavy, 1.0, 1.0, 1.0, 1.0, 1.0), slots)
    assert longest_gap_s(events) <= (8 * STALL_STEPS + 6 * (TURN_STEPS + 3)) * STEP_S
    assert min(counts.values()) > 0
    assert counts[1] == max(counts.values())


@pytest.mark.parametrize("heavy", [4.0, 100.0])
def test_weights_break_no_promise(heavy):
    """Without a promise the light adapters pause for longer than a second."""
    weights = (heavy, 1.0, 1.0, 1.0, 1.0)
    assert longest_gap_s(tokens(weights, 2, until=6.0)[1]) > 1.0
    promised = PolicyConfig(lora_max_stall_ms=1000.0)
    assert longest_gap_s(tokens(weights, 2, until=6.0, policy=promised)[1]) <= 1.0
