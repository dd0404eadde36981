"""Threads are what was asked for, or what was quicker when it was tried."""

from __future__ import annotations

import itertools

import pytest
import torch

from rota.engine.autotune import AutotuneCache
from rota.engine.cpu import FEW_TOKENS, Threads, choose_threads, set_threads


def never(_tokens: int, _threads: int) -> float:
    raise AssertionError("nothing has to be tried")


def test_a_number_that_was_asked_for_is_taken_without_a_trial():
    assert choose_threads(3, 8, never) == Threads(3, 3)


def test_one_processor_leaves_no_choice():
    assert choose_threads("auto", 1, never) == Threads(1, 1)


@pytest.mark.parametrize(
    ("few", "many", "chosen"),
    [
        # Milliseconds with one thread and with all eight.
        ((10.0, 6.0), (40.0, 9.0), Threads(8, 8)),
        ((10.0, 14.0), (40.0, 25.0), Threads(1, 8)),
        ((10.0, 14.0), (40.0, 70.0), Threads(1, 1)),
        # All of them have to be worth it.
        ((10.0, 9.8), (40.0, 39.0), Threads(1, 1)),
    ],
)
def test_one_or_all_whichever_was_quicker_for_small_steps_and_for_larger_ones(few, many, chosen):
    def seconds(tokens: int, threads: int) -> float:
        return (few if tokens <= FEW_TOKENS else many)[threads > 1]

    assert choose_threads("auto", 8, seconds) == chosen


def test_a_second_start_takes_as_many_and_times_no_step():
    first = AutotuneCache()
    with first.in_use():
        chosen = choose_threads("auto", 8, lambda tokens, threads: float(threads if tokens <= FEW_TOKENS else -threads))

    with AutotuneCache(first.made).in_use():
        assert choose_threads("auto", 8, never) == chosen == Threads(1, 8)
        assert choose_threads("auto", 4, lambda _tokens, threads: -float(threads)) == Threads(4, 4)


def test_a_neighbour_that_is_busy_for_a_moment_does_not_decide():
    turns = itertools.count()

    def seconds(_tokens: int, threads: int) -> float:
        busy = next(turns) < 2
        return (4.0 if threads > 1 else 10.0) * (5.0 if busy and threads > 1 else 1.0)

    assert choose_threads("auto", 8, seconds) == Threads(8, 8)


def test_a_step_is_computed_by_as_many_as_its_size_is_worth():
    before = torch.get_num_threads()
    try:
        threads = Threads(few=1, many=2)
        threads.use(FEW_TOKENS)
        assert torch.get_num_threads() == 1
        threads.use(FEW_TOKENS + 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("replicas", "each"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_replicas_share_the_processors(monkeypatch, replicas: int, each: int):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    try:
        torch.set_num_threads(8)
        assert set_threads(replicas) == each
    finally:
        torch.set_num_threads(before)
