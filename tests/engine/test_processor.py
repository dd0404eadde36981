"""The processor at hand is asked what it does; acting an older one shows that the answer counts."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
import torch

from rota.engine import cpu
from rota.engine.cpu import slowdown, this_processor
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
