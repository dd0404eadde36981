"""A process counts the processors that it may use, and not those of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.engine.lora.host import MOST_THREADS, threads_for_reads
from rota.machine import read_words, usable_processors


@pytest.fixture
def limits(tmp_path: Path, monkeypatch) -> Path:
    """The folder of a container's limits, on a machine of 32 processors."""
    monkeypatch.setattr("rota.machine.LIMITS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "usable"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("6400000 100000", 8),
        ("max 100000", 8),
        ("", 8),
    ],
)
def test_a_container_grants_at_most_its_quota(tmp_path: Path, quota: str, usable: int):
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_processors(8, tmp_path) == usable


def test_without_limits_all_processors_are_usable_that_the_process_may_run_on(limits: Path, monkeypatch):
    assert read_words(limits / "cpu.max") == []
    assert usable_processors() == 32
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 8})
    assert usable_processors() == 3


@pytest.mark.usefixtures("limits")
def test_where_a_system_names_no_processors_of_a_process_those_of_the_machine_count(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert usable_processors() == 6


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", MOST_THREADS), ("800000 100000", 4), ("200000 100000", 1), ("50000 100000", 1)],
)
def test_an_adapter_is_read_by_half_of_the_processors_that_a_container_grants(limits: Path, quota: str, threads: int):
    (limits / "cpu.max").write_text(quota)
    assert threads_for_reads() == threads
