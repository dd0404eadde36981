"""When an adapter leaves its slot, the scheduler notes until when its answers' readers have text."""

from __future__ import annotations

import math

import pytest

from rota.core.events import Preempted
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.core.tenant import Tenant
from rota.scheduler.accounts import Account
from rota.scheduler.adapter_state import AnswerLengths, Group
from rota.scheduler.sequence import Phase, Sequence
from tests.builders import add_adapter, request
from tests.scheduler.stage import Stage

STEP_S, READ_S = 0.01, 0.05
PROMPT = 5


def sequence(made: int, id: str = "r") -> Sequence:
    """`made` tokens of its answer are computed or in flight."""
    begun = Sequence(request(id, prompt=PROMPT, max_new_tokens=400), 400 + PROMPT, Account(Tenant(name="a")))
    begun.planned = PROMPT + made - 1
    return begun


@pytest.mark.parametrize(
    ("stays", "read_until"),
    [
        ([(100.0, 0)], -math.inf),  # no token yet
        ([(100.0, 1)], 99.99 + 0.05),
        ([(100.0, 11)], 99.89 + 0.55),
        ([(100.0, 11), (100.2, 14)], 100.44 + 0.15),  # it reads on without a halt
        ([(100.0, 1), (103.0, 4)], 102.97 + 0.15),  # it stood, and reads on when the next token comes
        ([(100.0, 11), (103.0, 11)], 99.89 + 0.55),  # nothing new
        ([(100.0, 11), (103.0, -4)], 99.89 + 0.55),  # preempted: the tokens that it has stay with the reader
    ],
)
def test_a_reader_takes_tokens_from_when_they_came_at_its_own_pace(stays, read_until):
    reader = sequence(0)
    for at, made in stays:
        reader.planned = PROMPT + made - 1
        reader.note_reader(at, STEP_S, READ_S)
    assert reader.read_until == pytest.approx(read_until)


@pytest.mark.parametrize(("made", "first"), [([], None), ([0], None), ([3, 11], 3), ([0, 11], 11)])
def test_of_an_adapter_s_readers_the_one_who_stands_first_counts(made, first):
    group = Group(add_adapter(1).adapter, AnswerLengths())
    group.enter(Account(Tenant(name="a")))
    for number, tokens in enumerate(made):
        group.join(sequence(tokens, f"r{number}"), Phase.DECODE if tokens else Phase.PREFILL)
    for one in group.running_sequences():
        one.row = 0
        one.note_reader(100.0, STEP_S, READ_S)
    assert group.stands_since == pytest.approx(math.inf if first is None else 100.0 + first * (READ_S - STEP_S))


def test_it_is_noted_when_an_answer_loses_its_kv():
    stage = Stage(adapters=0, rows=4, blocks=8, block_size=16, policy=PolicyConfig(reader_pace=20.0))
    stage.ask("old", prompt=46, max_new_tokens=60)
    stage.ask("young", at=1.0, prompt=46, max_new_tokens=60)
    stage.step(at=1.0)
    while not stage.said(Preempted):
        stage.step(at=stage.now + STEP_S)
    waiting = stage.scheduler._state.base.queue.first()
    assert waiting is not None
    assert waiting.given == len(waiting.tokens) - 46 + waiting.steps_in_flight
    assert stage.now < waiting.read_until < stage.now + 1.0


def test_what_is_embedded_has_no_reader():
    group = Group(None, AnswerLengths())
    group.enter(Account(Tenant(name="a")))
    embedded = sequence(3)
    embedded.pooling, embedded.given, embedded.read_until = "mean", 3, 100.0
    group.join(embedded, Phase.PREFILL)
    assert group.stands_since == math.inf


@pytest.mark.parametrize(("pace", "is_known"), [(20.0, True), (0.0, False)])
def test_it_is_noted_when_the_adapter_leaves_and_not_if_nobody_reads(pace, is_known):
    stage = Stage(slots=1, policy=PolicyConfig(lora_policy="rotate", reader_pace=pace))
    stage.seat(1)
    stage.ask("newcomer", adapter=2)
    absent = stage.scheduler._state.absent
    while AdapterId(1) not in absent:
        stage.step(at=stage.now + STEP_S)
    left = absent.get(AdapterId(1))
    assert left is not None
    assert (stage.now < left.stands_since < stage.now + 1.0) is is_known
    assert (left.stands_since == math.inf) is not is_known
