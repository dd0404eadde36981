"""A pause stops all answers at a token's border, and a resume lets them go on as if nothing had been."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import SchedulerConfig
from rota.core.errors import FaultCode
from rota.core.events import AdapterAdded, AdapterRemoved, Event, Explained, FinishReason, PauseChanged, Produced
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import AbortAll, Explain, Message, Pause, RemoveAdapter, Resume
from rota.core.request import Request
from tests.builders import abort, add_adapter, capacity, request, submit
from tests.fakes import FakeDevice, continuation
from tests.worlds import endings, outputs, serve

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
Script = list[tuple[float, Message]]


def pauses(events: list[Event]) -> list[tuple[float, bool]]:
    return [(event.at, event.is_paused) for event in events if isinstance(event, PauseChanged)]


def tokens_between(events: list[Event], start: float, end: float) -> int:
    return sum(len(event.tokens) for event in events if isinstance(event, Produced) and start < event.at < end)


@st.composite
def paused_traffic(draw: st.DrawFn) -> Script:
    """Requests for three models, some of which are aborted, among pauses of both kinds; a resume comes last."""
    script: Script = [(0.0, add_adapter(number)) for number in (1, 2)]
    for number in range(draw(st.integers(1, 9))):
        at = float(draw(st.integers(0, 40)))
        adapter, length, output = draw(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 20)))
        script.append(
            (at, submit(f"r{number}", prompt=length, max_new_tokens=output, arrived_at=at, adapter=AdapterId(adapter)))
        )
        if draw(st.integers(0, 3)) == 0:
            left_at = at + draw(st.integers(0, 25))
            script.append((left_at, abort(f"r{number}", at=left_at)))
    for at in draw(st.lists(st.integers(0, 60), max_size=5)):
        script.append((float(at), draw(st.sampled_from([Pause(at), Pause(at, is_drained=True), Resume(at)]))))
    return [*script, (1000.0, Resume(1000.0))]


@settings(max_examples=120, deadline=None)
@given(script=paused_traffic(), blocks=st.integers(6, 24), depth=st.sampled_from([1, 2]), rows=st.integers(1, 5))
def test_whatever_comes_between_pauses_every_request_ends_once_with_the_right_tokens(script, blocks, depth, rows):
    found = capacity(blocks=blocks, block_size=8, rows=rows, slots=1, max_sequence_tokens=64)
    events = serve(script, FakeDevice(found), SchedulerConfig(chunked_prefill_size=16), depth)

    given_tokens, ended = outputs(events), endings(events)
    asked = {message.request_id: message for _, message in script if isinstance(message, Request)}
    assert set(ended) == set(asked)
    for request_id, one in asked.items():
        answer = continuation(one.prompt, one.sampling.max_new_tokens)
        got = given_tokens.get(request_id, [])
        assert got == (answer[: len(got)] if ended[request_id].reason is FinishReason.ABORT else answer)
    orders = sorted((when, nth) for nth, (when, message) in enumerate(script) if isinstance(message, Pause | Resume))
    for (at, is_paused), (until, _) in pairwise(pauses(events)):
        # An order that came during the last steps before the pause is taken down behind it. The pause's own order
        # came then too, unless it let answers end first.
        late = [when for when, _ in orders if at - depth - 1 < when < at]
        before = [script[nth][1] for when, nth in orders if when <= at - depth - 1]
        was_drained = bool(before) and isinstance(before[-1], Pause) and before[-1].is_drained
        if is_paused and len(late) <= (0 if was_drained else 1):
            assert not tokens_between(events, at, min([until, *(when for when, _ in orders if when >= at)]))


@DEPTHS
def test_answers_stop_at_a_token_and_go_on_where_they_stopped(depth):
    asked = request("long", max_new_tokens=12)
    script = [(0.0, submit("long", max_new_tokens=12)), (4.0, Pause(4.0)), (500.0, Resume(500.0))]
    events = serve(script, FakeDevice(), depth=depth)

    (paused_at, _), (resumed_at, _) = pauses(events)
    assert paused_at <= 4.0 + depth  # no step but those in flight
    assert resumed_at == 500.0
    assert tokens_between(events, paused_at, 500.5) == 0
    assert 3 <= tokens_between(events, 0.0, paused_at + 0.5) < 12
    assert outputs(events)["long"] == continuation(asked.prompt, 12)


@DEPTHS
def test_requests_that_come_during_a_pause_wait_for_its_end(depth):
    script = [(0.0, Pause(0.0)), (5.0, submit("new", arrived_at=5.0)), (90.0, Resume(90.0))]
    events = serve(script, FakeDevice(), depth=depth)

    assert outputs(events)["new"] == continuation(request("new").prompt, 4)
    assert endings(events)["new"].at > 90.0


@pytest.mark.parametrize("is_drained", [False, True])
def test_who_leaves_during_a_pause_is_gone_at_once(is_drained):
    script = [
        (0.0, submit("running", max_new_tokens=40)),
        (3.0, Pause(3.0, is_drained)),
        (5.0, submit("new", arrived_at=5.0)),
        (8.0, abort("new", at=8.0)),
        (8.0, abort("running", at=8.0)),
    ]
    ended = endings(serve([*script, (900.0, Resume(900.0))], FakeDevice()))

    assert {one.reason for one in ended.values()} == {FinishReason.ABORT}
    assert all(one.at == 8.0 for one in ended.values())


def test_all_are_ended_while_others_drain():
    script = [(0.0, submit("old", max_new_tokens=40)), (2.0, Pause(2.0, True)), (3.0, submit("new", arrived_at=3.0))]
    ended = endings(serve([*script, (5.0, AbortAll(5.0)), (9.0, Resume(9.0))], FakeDevice()))

    assert {one.reason for one in ended.values()} == {FinishReason.ABORT}


@DEPTHS
def test_a_pause_that_drains_answers_what_is_open_first_and_later_requests_wait(depth):
    script = [
        (0.0, submit("open", max_new_tokens=9)),
        (2.0, Pause(2.0, is_drained=True)),
        (3.0, submit("late", max_new_tokens=2, arrived_at=3.0)),
        (400.0, Resume(400.0)),
    ]
    events = serve(script, FakeDevice(), depth=depth)

    (paused_at, _), _ = pauses(events)
    ended = endings(events)
    assert ended["open"].at <= paused_at < 400.0 < ended["late"].at
    assert outputs(events)["late"] == continuation(request("late").prompt, 2)


def test_an_adapter_is_loaded_and_another_unloaded_during_a_pause():
    script = [
        (0.0, add_adapter(1)),
        (10.0, Pause(10.0)),
        (11.0, add_adapter(2, at=11.0)),
        (12.0, RemoveAdapter(adapter_id=AdapterId(1), at=12.0)),
        (20.0, submit("new", arrived_at=20.0, adapter=AdapterId(2))),
        (300.0, Resume(300.0)),
    ]
    events = serve(script, FakeDevice())

    news = {type(event): event.at for event in events if isinstance(event, AdapterAdded | AdapterRemoved)}
    assert max(news.values()) < 300.0
    assert outputs(events)["new"] == continuation(request("new").prompt, 4)


@pytest.mark.parametrize("is_drained", [False, True])
def test_an_adapter_that_leaves_during_a_pause_answers_its_requests_first(is_drained):
    one = AdapterId(1)
    script = [
        (0.0, add_adapter(1)),
        (5.0, submit("open", max_new_tokens=30, arrived_at=5.0, adapter=one)),
        (9.0, Pause(9.0, is_drained)),
        (10.0, submit("late", arrived_at=10.0, adapter=one)),
        (11.0, RemoveAdapter(adapter_id=one, at=11.0)),
        (12.0, submit("too late", arrived_at=12.0, adapter=one)),
        (200.0, Resume(200.0)),
    ]
    events = serve(script, FakeDevice())

    ended = endings(events)
    assert [ended[RequestId(name)].reason for name in ("open", "late")] == [FinishReason.LENGTH] * 2
    assert ended["too late"].fault.code is FaultCode.UNKNOWN_ADAPTER
    assert any(isinstance(event, AdapterRemoved) for event in events)


@pytest.mark.parametrize("is_drained", [False, True])
def test_a_request_that_waits_for_a_resume_is_told_so(is_drained):
    script = [
        (0.0, submit("open", max_new_tokens=6)),
        (2.0, Pause(2.0, is_drained)),
        (3.0, submit("new", arrived_at=3.0)),
        (4.0, Explain(RequestId("new"), 4.0)),
        (50.0, Explain(RequestId("new"), 50.0)),
        (60.0, Resume(60.0)),
    ]
    reasons = [event.reason for event in serve(script, FakeDevice()) if isinstance(event, Explained)]
    assert reasons == ["the server is paused"] * 2


def test_requests_that_wait_for_others_to_drain_count_as_queued():
    script = [(0.0, submit("open", max_new_tokens=20)), (2.0, Pause(2.0, True))]
    script += [(3.0, submit(name, arrived_at=3.0)) for name in ("one", "two", "three")]
    config = SchedulerConfig(max_queued_requests=2)
    ended = endings(serve([*script, (90.0, Resume(90.0))], FakeDevice(), config))

    assert ended["three"].fault.code is FaultCode.QUEUE_FULL
    assert [ended[name].reason for name in ("one", "two")] == [FinishReason.LENGTH] * 2
