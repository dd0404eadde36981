"""On a GPU the stream of a step waits for a copy: in graphs and outside, A below the matrices and apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rota.core.adapter import Adapter
from rota.core.messages import AdapterReady
from rota.core.plan import NO_TOKEN
from rota.engine.engine import Engine
from rota.engine.lora import layout
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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

ROUNDS = 48
# Some 10 ms of an H200: longer than many steps of a tiny model.
CYCLES = 20_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Adapter, ...]]:
    return make_three(tmp_path_factory.mktemp("eager"))


@pytest.fixture(params=["graphs", "kernel by kernel"])
def engine(request, made, monkeypatch) -> Iterator[Engine]:
    # Any bank is large beside a tiny model's matrices.
    monkeypatch.setattr(layout, "LARGEST_SHARE", 100.0 if request.param == "graphs" else 0.0)
    engine = build(made[0], device="cuda", enable_cuda_graphs=request.param == "graphs")
    yield engine
    engine.close()


@pytest.fixture
def story(engine, made) -> Story:
    return Story(engine, made[1])


def sleep_on_device() -> None:
    torch.cuda._sleep(CYCLES)


def test_slots_that_change_hands_every_step_give_the_tokens_of_an_engine_that_waits_for_each_copy(story, monkeypatch):
    right = slots_change_hands_every_step(story, ROUNDS, is_patient=True)
    LateCopies(monkeypatch, sleep_on_device)

    assert slots_change_hands_every_step(story, ROUNDS, is_patient=False) == right
    assert len(set(right)) > 5


@pytest.fixture(params=["graphs", "kernel by kernel"])
def paged_story(request, made, monkeypatch) -> Iterator[Story]:
    monkeypatch.setattr(layout, "LARGEST_SHARE", 100.0 if request.param == "graphs" else 0.0)
    engine = build(made[0], FIRST_THREE, device="cuda", enable_cuda_graphs=request.param == "graphs")
    assert engine.capacity.pages
    yield Story(engine, made[1])
    engine.close()


def test_pages_that_change_slots_every_step_give_the_tokens_of_slots_with_places_of_their_own(
    story, paged_story, monkeypatch
):
    right = slots_change_hands_every_step(story, ROUNDS, is_patient=True)
    assert pages_change_hands_every_step(paged_story, ROUNDS, is_patient=True) == right
    LateCopies(monkeypatch, sleep_on_device)
    assert pages_change_hands_every_step(paged_story, ROUNDS, is_patient=False) == right


def test_a_copy_waits_for_steps_in_flight_that_read_its_pages_through_another_slot(paged_story):
    story = paged_story
    story.step(load={3: 0}, pages={3: (3, 1)})
    right = [story.step(begin=[3]), story.step(decode=[3])]
    story.wait_for(AdapterReady, 1)
    assert story.step(begin=[3]) == right[0]
    sleep_on_device()  # on the stream of the steps: the step is in flight when the copies are ordered
    ticket = story.submit(decode=[3])
    last = story.submit(load={1: 1, 2: 2}, pages={1: (1,), 2: (3,)}, begin=[1, 2])

    assert story.engine.collect(ticket).tokens == right[1]
    assert NO_TOKEN not in story.engine.collect(last).tokens


def test_the_copies_time_is_that_on_the_device(story, monkeypatch):
    story.step(load={1: 0})
    story.wait_for(AdapterReady, 1)
    LateCopies(monkeypatch, sleep_on_device)
    story.step(load={2: 1}, begin=[2])
    story.wait_for(AdapterReady, 2)
    quick, slow = (message.copy_s for message in story.messages if isinstance(message, AdapterReady))

    assert 0.0 < quick < slow
    assert slow > 1e-3


def test_steps_that_do_not_use_the_slot_do_not_wait_for_its_copy(story, monkeypatch):
    story.step(load={1: 0})
    right = [story.step(begin=[1]), *(story.step(decode=[1]) for _ in range(4))]
    story.wait_for(AdapterReady, 1)
    copies = HeldCopies(monkeypatch)
    story.step(load={2: 1})
    found = [story.step(begin=[1]), *(story.step(decode=[1]) for _ in range(4))]

    assert found == right
    assert story.count(AdapterReady) == 1
    copies.release()
    story.wait_for(AdapterReady, 2)


def test_a_step_that_waits_for_a_copy_that_fails_gives_no_token_for_its_rows(story, monkeypatch):
    story.step(load={1: 0})
    right = [story.step(begin=[1])[0], *(story.step(decode=[1])[0] for _ in range(2))]
    with monkeypatch.context() as patched:
        LateCopies(patched)
        fail_behind_copy(patched)
        story.step(begin=[1])
        story.step(load={3: 1})
        assert story.step(begin=[3], decode=[1]) == (right[1], NO_TOKEN)
    assert [message.adapter_id for message in failed(story)] == [3]
    assert story.step(decode=[1]) == (right[2],)
