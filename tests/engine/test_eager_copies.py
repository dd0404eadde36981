"""A step may use a slot while its adapter is still on its way: it waits for that copy and for no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rota.core.adapter import Adapter
from rota.core.config import FirstAdapters
from rota.core.ids import AdapterId
from rota.core.messages import AdapterReady
from rota.core.plan import NO_TOKEN
from rota.engine.engine import Engine
from tests.engine.eager_story import (
    FIRST_THREE,
    HeldCopies,
    LateCopies,
    Story,
    build,
    fail_behind_copy,
    failed,
    make_three,
    pages_change_hands_every_step,
    slots_change_hands_every_step,
)
from tests.waiting import TIMEOUT_S

ROUNDS = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Adapter, ...]]:
    return make_three(tmp_path_factory.mktemp("eager"))


@pytest.fixture
def begin(made) -> Iterator[Callable[..., Story]]:
    """Begins a story with an engine of its own."""
    engines: list[Engine] = []

    def begun(first: FirstAdapters | None = None) -> Story:
        engines.append(build(made[0], first))
        return Story(engines[-1], made[1])

    yield begun
    for engine in engines:
        engine.close()


@pytest.fixture
def story(begin) -> Story:
    return begin()


@pytest.fixture
def alone(begin) -> dict[int, list[int]]:
    """The first tokens of each row, when its adapter is in its slot long before."""
    story = begin()
    tokens: dict[int, list[int]] = {}
    for count, row in enumerate((0, 1, 2, 3)):
        if row:
            story.step(load={row: 0})
            story.wait_for(AdapterReady, count)
        tokens[row] = [story.step(begin=[row])[0], *(story.step(decode=[row])[0] for _ in range(5))]
    assert len(set(map(tuple, tokens.values()))) == 4
    return tokens


def test_slots_that_change_hands_every_step_give_the_tokens_of_an_engine_that_waits_for_each_copy(begin, monkeypatch):
    right = slots_change_hands_every_step(begin(), ROUNDS, is_patient=True)
    LateCopies(monkeypatch)

    assert slots_change_hands_every_step(begin(), ROUNDS, is_patient=False) == right
    assert len(set(right)) > 5


def test_pages_that_change_slots_every_step_give_the_tokens_of_slots_with_places_of_their_own(begin, monkeypatch):
    right = slots_change_hands_every_step(begin(), ROUNDS, is_patient=True)
    assert pages_change_hands_every_step(begin(FIRST_THREE), ROUNDS, is_patient=True) == right
    LateCopies(monkeypatch)

    assert pages_change_hands_every_step(begin(FIRST_THREE), ROUNDS, is_patient=False) == right


def test_a_copy_into_pages_that_fails_takes_no_page_from_others(begin, monkeypatch):
    story = begin(FIRST_THREE)
    story.step(load={1: 0, 3: 1}, pages={1: (5,), 3: (2, 4)})
    right = [*story.step(begin=[1, 3]), *story.step(decode=[1, 3])]
    story.step(begin=[1, 3])
    with monkeypatch.context() as patched:
        fail_behind_copy(patched)
        tokens = story.step(load={2: 2}, pages={2: (0,)}, begin=[2], decode=[1, 3])
    assert tokens == (*right[2:], NO_TOKEN)
    story.step(load={2: 3}, pages={2: (0,)})
    assert NO_TOKEN not in story.step(begin=[2])
    assert story.step(begin=[1, 3]) == tuple(right[:2])


def test_a_step_may_use_a_slot_that_its_own_plan_fills(story, alone, monkeypatch):
    LateCopies(monkeypatch)
    assert [*story.step(load={2: 0}, begin=[2]), *story.step(decode=[2])] == alone[2][:2]


def test_steps_that_do_not_use_the_slot_do_not_wait_for_its_copy(story, alone, monkeypatch):
    story.step(load={1: 0})
    story.wait_for(AdapterReady, 1)
    told = {row: list(story.step(begin=[row])) for row in (1, 0)}
    copies = HeldCopies(monkeypatch)
    story.step(load={2: 1})
    for _ in range(3):
        for row, token in zip((1, 0), story.step(decode=[1, 0]), strict=True):
            told[row].append(token)

    assert copies.has_begun.wait(TIMEOUT_S)
    assert story.count(AdapterReady) == 1
    assert told == {row: alone[row][:4] for row in (1, 0)}
    copies.release()
    assert list(story.step(begin=[2])) == alone[2][:1]


def test_a_copy_that_is_reported_says_how_long_it_took(story):
    story.step(load={1: 0})
    story.wait_for(AdapterReady, 1)
    (ready,) = (message for message in story.messages if isinstance(message, AdapterReady))
    assert 0.0 < ready.copy_s < 60.0


def test_a_step_that_waits_for_a_copy_that_fails_gives_no_token_for_its_rows_and_the_right_ones_for_others(
    story, alone, monkeypatch
):
    story.step(load={1: 0, 2: 1})
    story.wait_for(AdapterReady, 2)
    story.step(begin=[1, 2])
    with monkeypatch.context() as patched:
        LateCopies(patched)
        fail_behind_copy(patched)
        story.step(load={3: 1})
        tokens = story.step(begin=[3], decode=[1])
    assert tokens == (alone[1][1], NO_TOKEN)
    # It lay in the inbox when the step was submitted: the scheduler hears of it before the step's result.
    assert [(message.adapter_id, "no memory" in message.reason) for message in failed(story)] == [(3, True)]
    assert story.step(decode=[1, 3]) == (alone[1][2], NO_TOKEN)

    story.step(load={2: 1})
    assert story.step(decode=[2, 1]) == (alone[2][1], alone[1][3])


def test_a_slot_whose_copy_failed_holds_nothing_of_any_adapter(story, monkeypatch):
    story.step(load={3: 0})
    story.wait_for(AdapterReady, 1)
    with monkeypatch.context() as patched:
        fail_behind_copy(patched)
        story.step(load={2: 0}, begin=[2])
    assert story.engine._adapters.bank.factors(0, "o").ranks.tolist()[0] == 0
    story.step(load={1: 0}, begin=[1])
    factors = story.engine._adapters.bank.factors(0, "o")
    assert factors.ranks.tolist()[0] == 4
    assert not factors.b[0, 4:].any()


def test_an_adapter_that_can_no_longer_be_read_fails_and_its_step_does_not_hang(story, tmp_path):
    gone = Adapter(adapter_id=AdapterId(4), name="gone", path=str(tmp_path / "nowhere"))
    story.step(fetches=(gone,))
    assert story.step(load={4: 0}, begin=[4, 0])[0] == NO_TOKEN
    assert "nowhere" in failed(story)[-1].reason
