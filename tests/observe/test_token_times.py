"""Tokens that are noted many at once give the same records as tokens that are noted one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rota.core.events import Event, Finished, FinishReason, Produced
from rota.core.ids import AdapterId, RequestId
from rota.observe import summary
from rota.observe.summary import Recorder, TokenTimes


def traffic(seed: int) -> list[Event]:
    """Steps with some of the open requests each; a few requests end in between."""
    dice = random.Random(seed)
    open_ids = [RequestId(f"r{number}") for number in range(20)]
    at = 1.0
    events: list[Event] = [Produced(at=at, request_ids=tuple(open_ids), tokens=(0,) * len(open_ids))]
    while open_ids:
        at += dice.uniform(0.001, 0.1)
        chosen = tuple(one for one in open_ids if dice.random() < 0.7)
        events.append(Produced(at=at, request_ids=chosen, tokens=(0,) * len(chosen)))
        if dice.random() < 0.3:
            gone = open_ids.pop(dice.randrange(len(open_ids)))
            reason = dice.choice([FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ABORT])
            events.append(Finished(request_id=gone, at=at, reason=reason))
    return events


def new_recorder() -> Recorder:
    recorder = Recorder()
    for number in range(20):
        recorder.asked(RequestId(f"r{number}"), AdapterId(number % 3), number / 100)
    return recorder


def one_by_one(events: list[Event]) -> Recorder:
    recorder = new_recorder()
    for event in events:
        if isinstance(event, Produced):
            for request_id in event.request_ids:
                recorder.records[request_id].note_tokens(np.array([event.at]))
        else:
            recorder.observe([event])
    return recorder


@pytest.mark.parametrize("most", [1, 40, 1 << 18])
@pytest.mark.parametrize("seed", range(5))
def test_many_at_once_or_one_by_one_gives_the_same_records_and_summary(seed, most, monkeypatch):
    monkeypatch.setattr(summary, "MOST_TOKENS", most)
    events = traffic(seed)
    together, apart = new_recorder(), one_by_one(events)
    for event in events:
        together.observe([event])

    assert together.summary() == apart.summary()
    assert together.records == apart.records


def test_more_requests_than_a_short_number_can_count_are_told_apart():
    times = TokenTimes()
    ids = tuple(RequestId(f"r{number}") for number in range(70_000))
    for at in (1.0, 2.0):
        times.note(Produced(at=at, request_ids=ids, tokens=(0,) * len(ids)))
    found = {request_id: moments.tolist() for request_id, moments in times.take()}

    assert found == {request_id: [1.0, 2.0] for request_id in ids}
    assert not len(times)
    assert not list(times.take())
