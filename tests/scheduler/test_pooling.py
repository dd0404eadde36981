"""A request with pooling ends with the embedding of its whole prompt, and says nothing."""

from __future__ import annotations

import random

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import FaultCode, RequestError
from rota.core.events import Admitted, FinishReason, Preempted
from rota.core.plan import NO_TOKEN, StepResult
from rota.scheduler import Scheduler
from tests.builders import abort, add_adapter, capacity, request, submit
from tests.fakes import FakeDevice, continuation
from tests.worlds import endings, outputs, serve


def embedding(prompt: tuple[int, ...], pooling: str) -> tuple[float, float]:
    """What the fake gives: a token's hidden state is the token, and a one."""
    return (sum(prompt) / len(prompt), 1.0) if pooling == "mean" else (prompt[-1], 1.0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_prompts_are_pooled_whole_among_requests_that_are_answered(depth, chunk):
    messages = [(0.0, add_adapter(1))]
    for number, length in enumerate((1, 2, 7, 8, 30)):
        for pooling in ("last", "mean", None):
            asked = submit(f"{pooling} {length}", prompt=length, pooling=pooling, adapter=number % 2, logprobs=0)
            messages.append((0.0, asked))
    device = FakeDevice(capacity(rows=6))
    events = serve(messages, device, SchedulerConfig(chunked_prefill_size=chunk), depth)
    ended = endings(events)

    for _, message in messages[1:]:
        asked, end = message, ended[message.request_id]
        if asked.pooling is None:
            assert end.embedding is None
        else:
            assert end.embedding == pytest.approx(embedding(asked.prompt, asked.pooling))
            assert (end.reason, end.output_tokens) == (FinishReason.STOP, 0)
    assert outputs(events) == {
        message.request_id: continuation(message.prompt, 4) for _, message in messages[1:] if message.pooling is None
    }
    assert not any(pool.pooling == "last" for plan in device.plans for pool in plan.pools if not plan.sampled_rows)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_no_hidden_state_counts_twice_when_sequences_are_preempted(depth, seed):
    dice = random.Random(seed)
    asked = [
        request(
            f"r{number}",
            prompt=dice.randrange(1, 34),
            max_new_tokens=dice.randrange(1, 30),
            pooling=dice.choice(["last", "mean", None]),
        )
        for number in range(14)
    ]
    messages = [
        (at, submit(one.request_id, prompt=one.prompt, max_new_tokens=one.sampling.max_new_tokens, pooling=one.pooling))
        for at, one in zip(sorted(dice.randrange(20) for _ in asked), asked, strict=True)
    ]
    device = FakeDevice(capacity(blocks=12, block_size=4, rows=3))
    events = serve(messages, device, SchedulerConfig(chunked_prefill_size=3), depth)

    assert any(isinstance(event, Preempted) for event in events)
    for one in asked:
        if one.pooling is not None:
            found = endings(events)[one.request_id].embedding
            assert found == pytest.approx(embedding(one.prompt, one.pooling))


def test_a_mean_needs_every_token_and_the_last_state_only_what_is_not_cached():
    prompt = tuple(range(40))
    messages = [
        (0.0, submit("first", prompt=prompt)),
        (20.0, submit("mean", prompt=prompt, pooling="mean")),
        (40.0, submit("last", prompt=prompt, pooling="last")),
    ]
    events = serve(messages, FakeDevice())

    assert [event.cached_tokens for event in events if isinstance(event, Admitted)] == [0, 0, 32]
    assert endings(events)["mean"].embedding == (19.5, 1.0)
    assert endings(events)["last"].embedding == (39.0, 1.0)


def test_a_client_that_leaves_gets_no_embedding():
    messages = [
        (0.0, submit("leaves", prompt=30, pooling="mean")),
        (0.0, submit("stays", prompt=30, pooling="mean")),
        (1.5, abort("leaves")),
    ]
    ended = endings(serve(messages, FakeDevice(capacity(rows=4)), SchedulerConfig(chunked_prefill_size=7), 2))

    assert (ended["leaves"].reason, ended["leaves"].embedding) == (FinishReason.ABORT, None)
    assert ended["stays"].embedding is not None


@pytest.mark.parametrize("token", [0, 1])
def test_the_token_behind_a_prompt_that_is_pooled_is_not_read(token):
    state = Scheduler(SchedulerConfig(), capacity())
    state.apply(submit("pooled", prompt=5, pooling="last"))
    result = StepResult(at=0.0, tokens=(token,), pooled=((2.0, 1.0),))
    (end,) = endings(state.commit(state.plan(0.0), result)).values()

    assert (end.reason, end.embedding) == (FinishReason.STOP, (2.0, 1.0))


def test_hidden_states_that_are_not_numbers_are_no_embedding():
    state = Scheduler(SchedulerConfig(), capacity())
    state.apply(submit("pooled", prompt=5, pooling="last"))
    result = StepResult(at=0.0, tokens=(NO_TOKEN,), pooled=((float("nan"),),))
    (end,) = endings(state.commit(state.plan(0.0), result)).values()

    assert end.fault.code is FaultCode.NOT_A_NUMBER
    assert end.embedding is None


def test_a_way_to_pool_that_does_not_exist_is_refused():
    with pytest.raises(RequestError, match="pooling must be 'last' or 'mean', not 'max'"):
        request(pooling="max")
