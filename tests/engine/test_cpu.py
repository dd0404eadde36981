"""The processor at hand is asked what it does, and threads are what was asked for or what was quicker."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

from rota.engine import cpu
from rota.engine.autotune import AutotuneCache
from rota.engine.cpu import FEW_TOKENS, Threads, choose_threads, set_threads, slowdown, this_processor
from tests.processes import run_program

X86 = platform.machine() in ("x86_64", "AMD64")
SAY = "from rota.engine.cpu import this_processor as p; print(len(p().multiplies), p().four_bit)"


def acted(**limits: str) -> str:
    """What an engine finds where torch and oneDNN are told to use no more than this."""
    found = run_program([sys.executable, "-c", SAY], env={**os.environ, **limits})
    assert found.stderr == ""
    return found.stdout.strip()


def test_a_processor_is_looked_at_once():
    assert this_processor() is this_processor()


@pytest.mark.skipif(
    X86, reason="asks an ARM processor whether it has the dot products that its own line of features names"
)
def test_an_arm_processor_with_dot_products_has_a_quick_product_in_four_bits():
    features = Path("/proc/cpuinfo").read_text()
    assert (this_processor().four_bit == "dynamic") == ("asimddp" in features)


def test_an_emulated_precision_is_not_taken_for_arithmetic_whatever_the_library_says(monkeypatch):
    monkeypatch.setattr(cpu, "slowdown", lambda _: 2.3)
    this_processor.cache_clear()
    try:
        assert this_processor().multiplies == frozenset()
    finally:
        this_processor.cache_clear()
    assert slowdown(torch.float32) > 0.0


def test_without_onednn_nothing_is_found_faster_than_float32(monkeypatch):
    """torch switches oneDNN off after a product that it cannot do. Then float32 is slow, which proves nothing."""
    monkeypatch.setattr(cpu, "slowdown", lambda _: 0.5)
    cpu.do_without_onednn()
    this_processor.cache_clear()
    try:
        assert this_processor().multiplies == frozenset()
    finally:
        torch._C._set_mkldnn_enabled(True)
        this_processor.cache_clear()


@pytest.mark.skipif(not X86, reason="acts older x86 processors, whose limits other processors do not know")
@pytest.mark.parametrize(
    ("vectors", "isa", "found"),
    [("default", "SSE41", "0 None"), ("avx2", "AVX2", "0 weight-only")],
)
def test_an_older_processor_multiplies_float32_alone(vectors, isa, found):
    assert acted(ATEN_CPU_CAPABILITY=vectors, ONEDNN_MAX_CPU_ISA=isa) == found


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
