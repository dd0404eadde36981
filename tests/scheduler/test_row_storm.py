"""Random traffic through few rows and short turns: sequences lose their rows all the time, and no token is wrong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.capacity import Capacity
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import Message, Submit
from rota.core.plan import StepPlan
from rota.core.policy_config import PolicyConfig
from rota.core.tenant import Tenant
from tests.builders import add_adapter, capacity, request
from tests.fakes import FakeDevice
from tests.scheduler.test_storm import expected, traffic
from tests.worlds import endings, outputs, serve

RESTLESS = PolicyConfig(lora_policy="rotate", lora_rotation_quantum_ms=500.0, lora_max_stall_ms=1000.0)


def resumed(plans: list[StepPlan]) -> int:
    """How often a sequence sat down and decoded in the same step."""
    return sum(seat.row in plan.decodes for plan in plans for seat in plan.seats)


@settings(max_examples=60, deadline=None)
@given(
    traffic(),
    st.integers(5, 40),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(3, 40),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([None, None, 8]),
)
def test_every_request_ends_once_with_the_right_tokens_though_rows_are_few(
    messages, blocks, rows, slots, step_tokens, is_caching, depth, is_overlapped, window
):
    found = Capacity(blocks=blocks, block_size=8, rows=rows, max_sequence_tokens=64, slots=slots, window=window)
    config = SchedulerConfig(chunked_prefill_size=step_tokens, enable_prefix_caching=is_caching)
    lora = LoraConfig(enable_lora_overlap_loading=is_overlapped)

    events = serve(messages, FakeDevice(found), config, depth, RESTLESS, lora)

    given_tokens, ended = outputs(events), endings(events)
    for _, message in messages:
        if isinstance(message, Submit):
            asked = message.request
            answer, right = given_tokens.get(asked.request_id, []), expected(asked, found)
            is_cut = ended.pop(asked.request_id).reason is FinishReason.ABORT
            assert answer == (right[: len(answer)] if is_cut else right)
    assert not ended


def test_rows_change_hands_nearly_every_step_and_no_prompt_is_computed_twice():
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in range(1, 7)]
    for number in range(18):
        adapter = AdapterId(1 + number % 6)
        asked = request(f"r{number}", prompt=20, max_new_tokens=30, arrived_at=1.0 + number / 9, adapter=adapter)
        messages.append((asked.arrived_at, Submit(asked)))
    for depth in (1, 2):
        found = capacity(blocks=200, rows=4, slots=2)
        device = FakeDevice(found)
        config = SchedulerConfig(enable_prefix_caching=False)
        events = serve(messages, device, config, depth, RESTLESS)

        assert all(end.reason is FinishReason.LENGTH for end in endings(events).values())
        chunks = [chunk for plan in device.plans for chunk in plan.chunks]
        assert sum(chunk.length for chunk in chunks) == 18 * 20
        assert resumed(device.plans) > len(device.plans) // 4


def test_one_without_a_row_goes_on_when_the_one_that_has_the_row_gives_up_its_kv():
    """`grows` holds the only row and gives up its KV. Nothing else happens, and `urgent` must have the row then."""
    asked = [
        request("short", prompt=1, max_new_tokens=1, adapter=AdapterId(2)),
        request(
            "urgent",
            prompt=1,
            max_new_tokens=4,
            adapter=AdapterId(1),
            tenant=Tenant(name="heavy", weight=3.0),
            priority=1,
        ),
        request("grows", prompt=9, max_new_tokens=25, adapter=AdapterId(1)),
    ]
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in (1, 2)]
    messages += [(0.0, Submit(one)) for one in asked]
    found = capacity(blocks=5, block_size=8, rows=1, slots=1)
    config = SchedulerConfig(chunked_prefill_size=6, enable_prefix_caching=False)
    lora = LoraConfig(max_loaded_loras=1, enable_lora_overlap_loading=False)
    events = serve(messages, FakeDevice(found), config, 1, PolicyConfig(lora_policy="rotate"), lora, 0.1)

    assert len(endings(events)) == len(asked)


def test_nobody_is_preempted_for_an_urgent_request_that_gets_no_row_by_it():
    """`parked` is as urgent as `urgent`, and its turn needs the only row; so to preempt `begins` would help nobody."""
    asked = [
        request("first", prompt=9, max_new_tokens=8),
        request("begins", prompt=4, max_new_tokens=9, adapter=AdapterId(2)),
        request("parked", prompt=26, max_new_tokens=19, adapter=AdapterId(3), arrived_at=10.0, priority=1),
        request("urgent", prompt=13, max_new_tokens=29, arrived_at=11.0, priority=1),
    ]
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in (2, 3)]
    messages += [(one.arrived_at, Submit(one)) for one in asked]
    found = capacity(blocks=26, block_size=8, rows=1, slots=1)
    config = SchedulerConfig(chunked_prefill_size=10, enable_prefix_caching=False)
    lora = LoraConfig(enable_lora_overlap_loading=False)
    events = serve(messages, FakeDevice(found), config, 2, RESTLESS, lora)

    assert len(endings(events)) == len(asked)
