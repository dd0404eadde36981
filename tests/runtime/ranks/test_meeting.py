from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq

from rota.core.config import EngineConfig
from rota.core.errors import ConfigError, EngineDiedError
from rota.runtime.ranks.follower import arrive
from rota.runtime.ranks.lead import agree
from rota.runtime.ranks.meeting import Meeting, Welcome, facts, open_line
from rota.runtime.ranks.processes import FollowerJob
from tests.builders import capacity
from tests.fakes import FakeDevice
from tests.runtime.ranks.rank_devices import config_of
from tests.waiting import TIMEOUT_S

SECRET = "known to the ranks"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def meeting_of(size: int, context: zmq.Context[Any]) -> Meeting:
    return Meeting(context, size, "tcp://127.0.0.1:*", SECRET)


class Guest(threading.Thread):
    """A rank that comes to a meeting."""

    def __init__(self, context: zmq.Context[Any], meeting: Meeting, config: EngineConfig, secret: str = SECRET) -> None:
        super().__init__(daemon=True)
        self._plans = open_line(context, zmq.DEALER)
        self._plans.connect(meeting.address)
        self._job = FollowerJob(make_device=FakeDevice, config=config, address="there", secret=secret, meet_s=TIMEOUT_S)
        self.answer: Welcome | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = arrive(self._plans, self._job)
        except ConfigError as error:
            self.answer = error
        except zmq.ZMQError:
            pass  # the test has ended


def guest(context: zmq.Context[Any], meeting: Meeting, rank: int, size: int, **fields: Any) -> Guest:
    return Guest(context, meeting, replace(config_of(size), rank=rank), **fields)


def no_complaint() -> str:
    return ""


def test_ranks_that_are_alike_are_welcomed_by_names_of_their_own(context):
    meeting = meeting_of(3, context)
    guests = [guest(context, meeting, rank, 3) for rank in (2, 1)]

    meeting.gather(no_complaint, TIMEOUT_S)
    meeting.compare(facts(config_of(3)))
    names = meeting.welcome("tcp://engines:1", "tcp://reports:2")

    for each in guests:
        each.join(TIMEOUT_S)
    assert {names[each.answer.name] for each in guests} == {1, 2}
    assert {(each.answer.meeting, each.answer.reports) for each in guests} == {("tcp://engines:1", "tcp://reports:2")}


def test_a_rank_that_does_not_arrive_is_named(context):
    meeting = meeting_of(4, context)
    guest(context, meeting, 2, 4)

    with pytest.raises(EngineDiedError, match="Ranks 1, 3 did not arrive within 1 seconds"):
        meeting.gather(no_complaint, 1.0)


def test_a_process_that_ends_before_it_arrives_is_not_waited_for(context):
    with pytest.raises(EngineDiedError, match="killed"):
        meeting_of(2, context).gather(lambda: "It was killed.", TIMEOUT_S)


def test_a_stranger_is_not_heard(context):
    meeting = meeting_of(2, context)
    guest(context, meeting, 1, 2, secret="a guess")

    with pytest.raises(EngineDiedError, match=r"Rank 1 did not arrive within 0\.5 seconds"):
        meeting.gather(no_complaint, 0.5)


@pytest.mark.parametrize(("rank", "size"), [(1, 3), (2, 2)])
def test_a_rank_of_another_group_is_refused_and_told_so(context, rank, size):
    meeting = meeting_of(2, context)
    other = guest(context, meeting, rank, size)

    sentence = f"Rank {rank} of {size} came to a meeting of 2 ranks"
    with pytest.raises(ConfigError, match=sentence):
        meeting.gather(no_complaint, TIMEOUT_S)
    other.join(TIMEOUT_S)
    assert sentence in str(other.answer)


def test_ranks_with_other_flags_are_refused_and_all_are_told_which_differs_in_what(context):
    meeting = meeting_of(3, context)
    other = replace(config_of(3, dtype="float16"), rank=2)
    guests = [guest(context, meeting, 1, 3), Guest(context, meeting, other)]
    meeting.gather(no_complaint, TIMEOUT_S)

    sentence = "rank 2 has float16 for --dtype, and rank 0 has auto"
    with pytest.raises(ConfigError, match=sentence):
        meeting.compare(facts(config_of(3)))
    for each in guests:
        each.join(TIMEOUT_S)
        assert sentence in str(each.answer)


def test_a_port_that_is_taken_is_named(context):
    holder = meeting_of(2, context)
    with pytest.raises(ConfigError, match=f"cannot wait for the other ranks at {holder.address}"):
        Meeting(context, 2, holder.address)


def test_ranks_hold_what_the_smallest_can_hold():
    agreed = agree({0: capacity(blocks=90, slots=4), 1: capacity(blocks=70, slots=4), 2: capacity(blocks=80, slots=3)})

    assert agreed == replace(capacity(blocks=70, slots=3), ranks=3)


def test_ranks_that_differ_in_more_than_room_are_refused():
    with pytest.raises(ConfigError, match="rank 1 has 3 for rows, and rank 0 has 8"):
        agree({0: capacity(rows=8), 1: capacity(rows=3)})
