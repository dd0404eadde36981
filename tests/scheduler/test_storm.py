"""Random traffic through tiny ledgers: whatever comes, no block is lost and nobody gets a wrong token."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.capacity import Capacity
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import Abort, Message, Submit
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request
from rota.core.tenant import SOLE_TENANT, Tenant
from tests.builders import abort, add_adapter, request
from tests.fakes import FakeDevice, continuation
from tests.worlds import endings, outputs, serve

# Few different tokens and shared beginnings, so that prefixes meet in the cache.
ADAPTERS = range(1, 4)
TENANTS = [
    SOLE_TENANT,
    Tenant(name="heavy", weight=3.0),
    Tenant(name="light", weight=0.5, priority=1),
    Tenant(name="narrow", max_running=1),
]
PREFIXES = [(), tuple(range(8)), tuple(range(17)), (1,) * 24]


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[float, Message]]:
    tenants = draw(st.sampled_from([TENANTS[:1], TENANTS]))
    messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in ADAPTERS]
    for number in range(draw(st.integers(1, 12))):
        at = float(draw(st.integers(0, 40)))
        prompt = draw(st.sampled_from(PREFIXES)) + tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
        asked = request(
            f"r{number}",
            prompt=prompt,
            max_new_tokens=draw(st.integers(1, 30)),
            arrived_at=at,
            adapter=AdapterId(draw(st.integers(0, 3))),
            stop_token_ids=frozenset(draw(st.sets(st.integers(3, 255), max_size=20))),
            tenant=draw(st.sampled_from(tenants)),
            cache_scope=draw(st.sampled_from(["", "other"])),
        )
        priority, first_token_s = draw(st.sampled_from([0, 0, 1])), draw(st.sampled_from([None, None, 0.5, 5.0]))
        messages.append((at, Submit(replace(asked, priority=priority, first_token_s=first_token_s))))
        if draw(st.integers(0, 3)) == 0:
            left_at = at + draw(st.integers(0, 25))
            messages.append((left_at, abort(asked.request_id, at=left_at)))
    return messages


def expected(asked: Request, found: Capacity) -> list[int]:
    """What the fake model answers on its own, with nobody else about."""
    longest = min(found.max_sequence_tokens, found.blocks * found.block_size)
    answer: list[int] = []
    length = min(asked.sampling.max_new_tokens, longest - len(asked.prompt))
    for token in continuation(asked.prompt, length, window=found.window):
        answer.append(token)
        if token in asked.sampling.stop_token_ids:
            break
    return answer


@st.composite
def policies(draw: st.DrawFn) -> PolicyConfig:
    """Times in steps: a step takes a second in these worlds."""
    return PolicyConfig(
        lora_policy=draw(st.sampled_from(["rotate", "drain", "wait"])),
        lora_rotation_quantum_ms=draw(st.sampled_from([None, None, 500.0, 7000.0])),
        lora_max_stall_ms=draw(st.sampled_from([None, None, 1000.0, 10_000.0])),
        lora_drain_wait_threshold=draw(st.sampled_from([0.5, 1.5, 6.0])),
        enable_prefill_delayer=draw(st.booleans()),
        prefill_delayer_max_delay_passes=draw(st.sampled_from([1, 3, 30])),
        prefill_delayer_max_delay_ms=draw(st.sampled_from([500.0, 5000.0])),
        prefill_delayer_token_usage_low_watermark=draw(st.sampled_from([None, 0.5])),
        prefill_delayer_queue_min_ratio=draw(st.sampled_from([None, 0.5])),
    )


@settings(max_examples=150, deadline=None)
@given(
    traffic(),
    st.integers(5, 24),
    st.integers(1, 6),
    st.integers(6, 40),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    policies(),
    st.builds(
        LoraConfig,
        max_loras_per_batch=st.just(1),
        max_loaded_loras=st.integers(1, 4),
        lora_eviction_policy=st.sampled_from(["lru", "fifo"]),
        enable_lora_overlap_loading=st.booleans(),
    ),
    st.sampled_from([None, None, 1, 8, 13, 40]),
    st.sampled_from([0.1, 0.6, 1.7]),
    st.sampled_from([None, 4]),
    st.sampled_from([1, 1, 4]),
)
def test_every_request_ends_once_with_the_right_tokens_and_nothing_is_lost(
    messages, blocks, rows, step_tokens, is_caching, depth, slots, policy, lora, window, load_s, deep, row_step
):
    found = Capacity(
        blocks=blocks,
        block_size=8,
        rows=rows,
        max_sequence_tokens=64,
        slots=slots,
        window=window,
        deep_prefix=deep,
        row_step=row_step,
    )
    config = SchedulerConfig(chunked_prefill_size=step_tokens, enable_prefix_caching=is_caching)

    events = serve(messages, FakeDevice(found), config, depth, policy, lora, load_s)

    given_tokens, ended = outputs(events), endings(events)
    aborted = {message.request_id for _, message in messages if isinstance(message, Abort)}
    for _, message in messages:
        if not isinstance(message, Submit):
            continue
        asked = message.request
        answer, right = given_tokens.get(asked.request_id, []), expected(asked, found)
        assert answer == right[: len(answer)]
        end = ended.pop(asked.request_id)
        assert end.output_tokens == len(answer)
        if end.reason is FinishReason.ABORT:
            assert asked.request_id in aborted
        else:
            assert answer == right
    assert not ended
