from __future__ import annotations

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import ConfigError, FaultCode
from rota.core.events import Admitted, FinishReason, Preempted, Produced
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort
from rota.core.plan import NO_CHOICE, NO_TOKEN, StepPlan, StepResult, TokenLogprobs
from rota.scheduler import Scheduler
from tests.builders import abort, add_adapter, capacity, request, submit
from tests.fakes import FakeDevice, continuation
from tests.scheduler.balance import check_balance
from tests.scheduler.stage import Stage
from tests.worlds import endings, outputs, serve


def scheduler(config: SchedulerConfig | None = None, **found: int) -> Scheduler:
    return Scheduler(config or SchedulerConfig(), capacity(**found))


def commit(scheduler: Scheduler, plan: StepPlan, token: int = 7):
    return scheduler.commit(plan, StepResult(at=0.0, tokens=(token,) * len(plan.sampled_rows)))


def test_a_prompt_longer_than_a_step_is_computed_in_chunks_and_samples_only_at_its_end():
    subject = scheduler(SchedulerConfig(chunked_prefill_size=8))
    subject.apply(submit(prompt=20))

    chunks = []
    for _ in range(3):
        plan = subject.plan(0.0)
        chunks += [(chunk.start, chunk.length, chunk.samples) for chunk in plan.chunks]
        commit(subject, plan)
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_running_sequences_decode_in_the_step_that_computes_a_newcomers_prompt():
    subject = scheduler(SchedulerConfig(chunked_prefill_size=8))
    subject.apply(submit("old", prompt=2))
    commit(subject, subject.plan(0.0))
    subject.apply(submit("new", prompt=20))

    plan = subject.plan(0.0)
    assert plan.decodes == (0,)
    assert [chunk.length for chunk in plan.chunks] == [7]


def test_the_next_step_is_planned_before_this_ones_token_is_known():
    subject = scheduler()
    subject.apply(submit(prompt=3, max_new_tokens=3))

    plans = [subject.plan(0.0) for _ in range(4)]
    assert [len(plan.sampled_rows) for plan in plans] == [1, 1, 1, 0]


def test_a_plan_counts_its_adapters_and_the_tokens_that_it_attends_to():
    stage = Stage(adapters=2, slots=2)
    stage.ask("base", prompt=5, max_new_tokens=50)
    assert [(plan.adapters, plan.context_tokens) for plan in (stage.step(), stage.step())] == [(0, 5), (0, 6)]
    stage.seat(1, 2, prompt=7)
    plan = stage.step()
    assert (plan.adapters, plan.context_tokens) == (2, 25)


def test_a_token_computed_for_a_sequence_that_has_stopped_is_dropped():
    subject = scheduler()
    subject.apply(submit(prompt=3, stop_token_ids=frozenset({7})))
    first, second = subject.plan(0.0), subject.plan(0.0)

    produced, finished = [event for event in commit(subject, first) if not isinstance(event, Admitted)]
    assert produced.tokens == (7,)
    assert finished.reason is FinishReason.STOP
    (produced,) = commit(subject, second)
    assert produced.tokens == ()
    assert subject.is_idle


def test_logprobs_keep_to_their_request_when_another_has_stopped_in_flight():
    subject = scheduler()
    subject.apply(submit("stops", stop_token_ids=frozenset({7})))
    subject.apply(submit("stays", arrived_at=1.0, logprobs=1))
    first, second = subject.plan(0.0), subject.plan(0.0)
    subject.commit(first, StepResult(at=0.0, tokens=(7, 8)))
    logprobs = TokenLogprobs(-0.5, ((9, -0.5),))

    (produced,) = subject.commit(second, StepResult(at=0.0, tokens=(7, 9), logprobs=((1, logprobs),)))
    assert produced == Produced(at=0.0, request_ids=("stays",), tokens=(9,), logprobs=((0, logprobs),))


def test_a_request_ends_by_length_where_it_asked_or_where_the_context_ends():
    events = serve(
        [
            (0.0, submit("asked", prompt=4, max_new_tokens=5)),
            (0.0, submit("context", prompt=4, max_new_tokens=999)),
        ],
        FakeDevice(capacity(max_sequence_tokens=12)),
    )
    ended = endings(events)
    assert {id: (end.reason, end.output_tokens) for id, end in ended.items()} == {
        "asked": (FinishReason.LENGTH, 5),
        "context": (FinishReason.LENGTH, 8),
    }


@pytest.mark.parametrize(
    ("prompt", "found", "code", "number"),
    [
        (12, {"max_sequence_tokens": 12}, FaultCode.PROMPT_TOO_LONG, "12"),
        (40, {"blocks": 2, "block_size": 16}, FaultCode.PROMPT_TOO_LONG, "32"),
        ((5, 100, 7), {"vocabulary": 100}, FaultCode.BAD_FIELD, "100"),
    ],
)
def test_a_prompt_that_can_never_be_computed_is_refused_with_the_limit(prompt, found, code, number):
    subject = scheduler(**found)
    subject.apply(submit(prompt=prompt))

    (end,) = commit(subject, subject.plan(0.0))
    assert end.reason is FinishReason.FAILED
    assert end.fault.code is code
    assert number in end.fault.message
    assert subject.is_idle


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", ((5, 1.0), (100, 1.0))), ("allowed_token_ids", (100, 5)), ("bad_words", ((1, 2), (7, 100)))],
)
def test_a_token_that_the_model_does_not_have_is_refused_by_the_name_of_its_field(field, value):
    subject = scheduler(vocabulary=100)
    subject.apply(submit("wrong", prompt=(5, 6), **{field: value}))
    subject.apply(submit("right", prompt=(5, 6), stop_token_ids=frozenset({100})))

    ended = endings(commit(subject, subject.plan(0.0)))
    assert (ended["wrong"].fault.code, ended["wrong"].fault.param) == (FaultCode.BAD_FIELD, field)
    assert "has only 100 tokens" in ended["wrong"].fault.message
    assert "right" not in ended


def test_a_request_that_leaves_no_token_ends_with_a_sentence_and_alone():
    subject = scheduler()
    subject.apply(submit("a", arrived_at=0.0))
    subject.apply(submit("b", arrived_at=1.0))

    events = subject.commit(subject.plan(2.0), StepResult(at=2.0, tokens=(NO_CHOICE, 7)))
    (fault,) = [end.fault for end in endings(events).values()]
    assert fault.code is FaultCode.BAD_FIELD
    assert "No token is left" in fault.message
    assert outputs(events) == {"b": [7]}


def test_a_request_beyond_the_queue_is_refused_and_the_others_are_not():
    subject = scheduler(SchedulerConfig(max_queued_requests=2))
    for id in "abc":
        subject.apply(submit(id))

    events = commit(subject, subject.plan(0.0))
    assert {id: end.fault.code for id, end in endings(events).items()} == {"c": FaultCode.QUEUE_FULL}
    assert outputs(events).keys() == {"a", "b"}


def test_an_id_that_is_open_cannot_be_used_again_until_it_ends():
    subject = scheduler()
    subject.apply(submit("twin", max_new_tokens=1))
    subject.apply(submit("twin"))
    (refused, *_rest) = commit(subject, subject.plan(0.0))
    assert refused.fault.code is FaultCode.DUPLICATE_ID

    subject.apply(submit("twin", max_new_tokens=1))
    assert outputs(commit(subject, subject.plan(0.0))) == {"twin": [7]}


def test_more_requests_than_rows_wait_and_say_why():
    subject = scheduler(rows=1)
    subject.apply(submit("sits"))
    subject.apply(submit("waits"))
    plan = subject.plan(0.0)

    assert [seat.request_id for seat in plan.seats] == ["sits"]
    assert subject.refusals() == {"waits": "as many requests run as may run"}


def test_when_kv_runs_short_the_newest_gives_way_and_still_answers_in_full():
    device = FakeDevice(capacity(blocks=5, block_size=4))
    old, new = request("old", prompt=4, max_new_tokens=12), request("new", prompt=4, max_new_tokens=12)
    events = serve(
        [
            (0.0, submit("old", prompt=4, max_new_tokens=12)),
            (1.0, submit("new", prompt=4, max_new_tokens=12, arrived_at=1.0)),
        ],
        device,
    )

    assert {event.request_id for event in events if isinstance(event, Preempted)} == {"new"}
    assert outputs(events) == {one.request_id: continuation(one.prompt, 12) for one in (old, new)}


def test_a_prompt_seen_before_is_not_computed_again():
    prompt = tuple(range(40))
    events = serve([(0.0, submit("a", prompt=prompt)), (20.0, submit("b", prompt=prompt))], FakeDevice())

    assert [event.cached_tokens for event in events if isinstance(event, Admitted)] == [0, 32]
    assert endings(events)["b"].cached_tokens == 32
    assert outputs(events)["a"] == outputs(events)["b"]


def test_a_prompt_that_is_cached_to_its_last_token_still_computes_that_token():
    prompt = tuple(range(32))
    events = serve([(0.0, submit("a", prompt=prompt)), (20.0, submit("b", prompt=prompt))], FakeDevice())

    assert [event.cached_tokens for event in events if isinstance(event, Admitted)] == [0, 16]


def test_an_answer_is_reused_by_the_prompt_that_continues_it():
    prompt = tuple(range(30))
    answer = tuple(continuation(prompt, 20))
    events = serve(
        [
            (0.0, submit("a", prompt=prompt, max_new_tokens=20)),
            (50.0, submit("b", prompt=(*prompt, *answer, 5))),
        ],
        FakeDevice(),
    )
    assert endings(events)["b"].cached_tokens == 48


def test_two_adapters_with_the_same_prompt_share_no_kv():
    prompt = tuple(range(40))
    events = serve(
        [
            (0.0, add_adapter(1)),
            (0.0, submit("a", prompt=prompt)),
            (20.0, submit("b", prompt=prompt, adapter=AdapterId(1))),
        ],
        FakeDevice(),
    )
    assert endings(events)["b"].reason is FinishReason.LENGTH
    assert endings(events)["b"].cached_tokens == 0


def test_prefix_caching_can_be_turned_off():
    prompt = tuple(range(40))
    config = SchedulerConfig(enable_prefix_caching=False)
    events = serve([(0.0, submit("a", prompt=prompt)), (20.0, submit("b", prompt=prompt))], FakeDevice(), config)

    assert endings(events)["b"].cached_tokens == 0


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_an_abort_at_any_moment_frees_everything_within_the_pass(steps_before):
    subject = scheduler(SchedulerConfig(chunked_prefill_size=8))
    subject.apply(submit("gone", prompt=20, max_new_tokens=50))
    flying = [subject.plan(0.0) for _ in range(steps_before)]
    subject.apply(abort("gone", at=9.0))
    check_balance(subject)

    events = [event for plan in flying for event in commit(subject, plan)] + commit(subject, subject.plan(9.0))
    assert endings(events)["gone"].reason is FinishReason.ABORT
    assert outputs(events) == {}
    assert subject.is_idle
    check_balance(subject)


def test_a_request_that_has_all_it_needs_counts_as_stopped():
    subject = scheduler()
    subject.apply(submit("a"))
    subject.apply(Abort(RequestId("a"), at=1.0, is_complete=True))

    assert endings(commit(subject, subject.plan(1.0)))["a"].reason is FinishReason.STOP
    assert subject.is_idle


def test_aborting_an_unknown_request_changes_nothing():
    subject = scheduler()
    subject.apply(abort("stranger"))
    assert commit(subject, subject.plan(0.0)) == []


def test_a_step_too_small_for_the_rows_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="8 running requests"):
        scheduler(SchedulerConfig(chunked_prefill_size=7), rows=8)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_without_a_token_fails_and_nobody_beside_it_notices(depth):
    subject = scheduler()
    for name in ("lost", "well"):
        subject.apply(submit(name, prompt=4, max_new_tokens=9, logprobs=0))
    under_way = [subject.plan(0.0) for _ in range(depth)]
    events = []
    for step in range(4):
        plan = under_way.pop(0)
        tokens = tuple(NO_TOKEN if step == 2 and i == 0 else 7 for i in range(len(plan.sampled_rows)))
        logprobs = tuple((i, TokenLogprobs(-float(i), ())) for i in range(len(tokens)))
        events += subject.commit(plan, StepResult(at=float(step), tokens=tokens, logprobs=logprobs))
        check_balance(subject)
        under_way.append(subject.plan(0.0))

    assert endings(events)["lost"].fault.code is FaultCode.NOT_A_NUMBER
    assert endings(events)["lost"].output_tokens == 2
    assert outputs(events) == {"lost": [7, 7], "well": [7] * 4}
    told = [event.logprobs for event in events if isinstance(event, Produced)]
    assert [[place for place, _ in each] for each in told] == [[0, 1], [0, 1], [0], [0]]
    assert told[2][0][1].chosen == -1.0, "the log-probability is the other's own"
