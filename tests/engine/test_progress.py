"""Long work is told to a log, to a terminal and to whoever supervises the start."""

from __future__ import annotations

import io

import pytest

from rota.commands.logged import build_logged
from rota.core.config import EngineConfig, ServerConfig
from rota.engine.progress import BYTES, LINE_EVERY_S, Progress, tracked
from rota.start import START
from tests.engine.terminal import Terminal
from tests.fakes import FakeDevice


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(steps: int, step_s: float, total: int = 120, unit: str = "", is_quiet: bool = False) -> list[str]:
    """What a log holds after so many steps of such length."""
    log, clock = io.StringIO(), Clock()
    with Progress("Loading weights", total, unit, is_quiet, log, clock) as progress:
        for _ in range(steps):
            clock.now += step_s
            progress.update()
    return log.getvalue().splitlines()


def test_a_log_gets_a_plain_line_now_and_then_and_a_last_one():
    assert lines_of(steps=120, step_s=LINE_EVERY_S / 40) == [
        "Loading weights: 40 of 120",
        "Loading weights: 80 of 120",
        "Loading weights: 120 of 120",
    ]
    assert lines_of(steps=50, step_s=LINE_EVERY_S / 40, unit="requests")[-1] == "Loading weights: 50 of 120 requests"


def test_work_that_is_soon_done_leaves_no_line():
    assert lines_of(steps=120, step_s=LINE_EVERY_S / 121) == []


def test_an_end_long_after_the_last_step_has_a_line():
    log, clock = io.StringIO(), Clock()
    with Progress("Simulating", 2, stream=log, clock=clock) as progress:
        progress.update(2)
        clock.now += LINE_EVERY_S

    assert log.getvalue() == "Simulating: 2 of 2\n"


def test_bytes_are_told_in_units_that_people_read():
    log, clock = io.StringIO(), Clock()
    with Progress("Loading", 16_100_000_000, BYTES, stream=log, clock=clock) as progress:
        clock.now += LINE_EVERY_S
        progress.update(4_000_000_000)

    assert log.getvalue() == "Loading: 4.0 GB of 16.1 GB\n"


def test_a_terminal_gets_a_bar_that_is_wiped_away_at_the_end():
    terminal = Terminal()
    with Progress("Loading weights", 2, "tensors", stream=terminal) as progress:
        progress.update()

    assert "Loading weights:   0%" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


def test_the_quiet_hear_nothing_on_a_terminal_or_in_a_log():
    terminal = Terminal()
    with Progress("Loading weights", 2, is_quiet=True, stream=terminal) as progress:
        progress.update()

    assert terminal.getvalue() == ""
    assert lines_of(steps=120, step_s=LINE_EVERY_S, is_quiet=True) == []


def test_items_are_counted_as_they_go_by(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)

    assert list(tracked(["a", "b"], "Unpacking", "tensors")) == ["a", "b"]
    assert "Unpacking" in terminal.getvalue()
    assert list(tracked(["c"], "Unpacking", is_quiet=True)) == ["c"]


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What reaches the supervisor's side of this process; the listener is as before afterwards."""
    heard: list[str] = []
    monkeypatch.setattr(START, "tell_progress", heard.append)
    return heard


def test_all_long_work_of_a_start_reaches_the_supervisor_also_if_it_shows_no_bar(told, monkeypatch):
    monkeypatch.setattr("rota.commands.logged.set_up_logs", lambda *_: None)

    def make_device(_: EngineConfig) -> FakeDevice:
        with Progress("Loading", 2, is_quiet=True) as progress:
            progress.update()
        list(tracked([1, 2], "Capturing", is_quiet=True))
        START.tell_progress("Warming up")
        return FakeDevice()

    build_logged(make_device, EngineConfig(), ServerConfig())

    assert told == ["Loading", "Capturing", "Capturing", "Warming up"]
