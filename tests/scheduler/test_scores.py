"""A prompt's scores are told once each and in order, to those who asked."""

from __future__ import annotations

import random

import pytest

from rota.core.config import SchedulerConfig
from rota.core.events import Admitted, Event, Preempted, Produced, PromptsScored
from rota.core.plan import StepResult, TokenLogprobs
from rota.scheduler import Scheduler
from tests.builders import abort, add_adapter, capacity, request, submit
from tests.fakes import FakeDevice, continuation
from tests.worlds import endings, outputs, serve


def scored(events: list[Event]) -> dict[str, list[int]]:
    """The tokens that scores were told of; the fake finds each token itself the likeliest."""
    told: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, PromptsScored):
            for id, scores in zip(event.request_ids, event.scores, strict=True):
                told.setdefault(id, []).extend(score.top[0][0] for score in scores)
    return told


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_whoever_asks_gets_every_score_of_its_prompt_and_the_others_get_none(depth, chunk):
    messages = [(0.0, add_adapter(1))]
    for number, length in enumerate((1, 2, 7, 8, 30)):
        messages += [
            (0.0, submit(f"asks{length}", prompt=length, prompt_logprobs=1, adapter=number % 2)),
            (0.0, submit(f"does not{length}", prompt=length)),
        ]
    device = FakeDevice(capacity(rows=6))
    events = serve(messages, device, SchedulerConfig(chunked_prefill_size=chunk), depth)

    assert scored(events) == {
        f"asks{length}": list(request(f"asks{length}", prompt=length).prompt[1:]) for length in (2, 7, 8, 30)
    }
    assert all(plan.scorings == () or plan.chunks for plan in device.plans)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_no_score_is_told_twice_or_lost_when_sequences_are_preempted(depth, seed):
    dice = random.Random(seed)
    asked = [
        request(f"r{number}", prompt=dice.randrange(1, 34), max_new_tokens=dice.randrange(1, 30), prompt_logprobs=1)
        for number in range(10)
    ]
    messages = [
        (at, submit(one.request_id, prompt=one.prompt, max_new_tokens=one.sampling.max_new_tokens, prompt_logprobs=1))
        for at, one in zip(sorted(dice.randrange(20) for _ in asked), asked, strict=True)
    ]
    # Small steps beside long answers: some are preempted in the middle of their prompts.
    device = FakeDevice(capacity(blocks=12, block_size=4, rows=3))
    events = serve(messages, device, SchedulerConfig(chunked_prefill_size=3), depth)

    assert any(isinstance(event, Preempted) for event in events)
    assert scored(events) == {one.request_id: list(one.prompt[1:]) for one in asked if len(one.prompt) > 1}
    assert outputs(events) == {
        one.request_id: continuation(one.prompt, endings(events)[one.request_id].output_tokens) for one in asked
    }


def test_a_prompt_whose_scores_are_wanted_is_computed_even_where_its_kv_is_cached():
    prompt = tuple(range(40))
    messages = [
        (0.0, submit("first", prompt=prompt)),
        (20.0, submit("scored", prompt=prompt, prompt_logprobs=1)),
        (40.0, submit("last", prompt=prompt)),
    ]
    events = serve(messages, FakeDevice())

    assert [event.cached_tokens for event in events if isinstance(event, Admitted)] == [0, 0, 32]
    assert scored(events) == {"scored": list(prompt[1:])}


def test_a_prompt_preempted_half_way_goes_on_behind_what_is_scored_and_still_cached():
    state = Scheduler(SchedulerConfig(chunked_prefill_size=2), capacity(blocks=6, block_size=4, rows=2))
    state.apply(submit("old", prompt=3, max_new_tokens=8))
    state.apply(submit("scored", prompt=15, max_new_tokens=1, prompt_logprobs=0, arrived_at=1.0))
    events: list[Event] = []
    spans = []
    while not state.is_idle:
        plan = state.plan(2.0)
        spans += [(scoring.start, scoring.end) for scoring in plan.scorings]
        scores = (TokenLogprobs(-1.0, ()),) * sum(scoring.end - scoring.start for scoring in plan.scorings)
        events += state.commit(plan, StepResult(at=2.0, tokens=(7,) * len(plan.sampled_rows), scores=scores))

    assert [event.request_id for event in events if isinstance(event, Preempted)] == ["scored"]
    cached = [event.cached_tokens for event in events if isinstance(event, Admitted) and event.request_id == "scored"]
    assert cached == [0, 4]
    assert [token for start, end in spans for token in range(start, end)] == list(range(1, 15))


def test_scores_come_before_the_first_token():
    events = serve([(0.0, submit(prompt=9, prompt_logprobs=1))], FakeDevice())
    kinds = [type(event) for event in events if isinstance(event, PromptsScored | Produced)]

    assert kinds[:2] == [PromptsScored, Produced]


def test_nobody_hears_the_scores_of_a_request_that_left_while_they_were_made():
    state = Scheduler(SchedulerConfig(), capacity())
    state.apply(submit("leaves", prompt=5, prompt_logprobs=1))
    state.apply(submit("stays", prompt=4, prompt_logprobs=1, arrived_at=1.0))
    plan = state.plan(1.0)
    state.apply(abort("leaves", at=1.5))
    scores = tuple(TokenLogprobs(-float(number), ()) for number in range(7))
    events = state.commit(plan, StepResult(at=2.0, tokens=(7, 7), scores=scores))

    (told,) = [event for event in events if isinstance(event, PromptsScored)]
    assert told == PromptsScored(2.0, ("stays",), (scores[4:],))
