"""Every test has a time limit and leaves logs as they were; tests that take long are left to `make test-long`."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.waiting import TIMEOUT_S

# A machine that runs only some tests may lack Hypothesis and, with `-o required_plugins=`, pytest-timeout.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # A slow machine may take its time to draw an example and to try it. `make test` draws the same examples each time,
    # so that a change is judged by what it changes; `make test-long` draws others.
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("random", slow)
    settings.register_profile("same", slow, derandomize=True)
    settings.load_profile("same")


# Who answers late on a busy machine is waited for as long as a test may take.
with suppress(ImportError):
    from httpx._config import DEFAULT_TIMEOUT_CONFIG as PATIENCE

    PATIENCE.connect = PATIENCE.read = PATIENCE.write = PATIENCE.pool = TIMEOUT_S

# By the clock a test may take so many times its limit. Only one that hangs does, also beside a load of eight.
WALL_TIMES = 4
# How often a test's time is looked at.
LOOK_S = 5.0


# pytest makes this name while it runs, so mypy does not know it.
class OverdueError(pytest.fail.Exception, SystemExit):  # type: ignore[name-defined, misc]
    """Ends a test that takes too long; an event loop lets a `SystemExit` pass, and keeps other exceptions to itself."""

    __module__ = "builtins"  # so that pytest shows the bare name, as it does for its own


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, Any, Any]:
    """The limit is one of processor time, so that no test fails because the machine is busy with others.

    pytest-timeout's own exception would end a test as well, but not one that waits in an event loop.
    """
    is_set = yield
    if settings.method == "signal":
        show_stacks = signal.getsignal(signal.SIGALRM)
        assert callable(show_stacks), "pytest-timeout has set its handler"
        spent_s, began_at = processor_s(), time.monotonic()
        limit_s, wall_s = settings.timeout, WALL_TIMES * settings.timeout

        def look(number: int, frame: FrameType | None) -> None:
            __tracebackhide__ = True
            if processor_s() - spent_s < limit_s and time.monotonic() - began_at < wall_s:
                return
            try:
                show_stacks(number, frame)
            except pytest.fail.Exception:
                limits = f"{limit_s:g} seconds of processor time or {wall_s:g} seconds by the clock"
                raise OverdueError(f"The test did not end within {limits}, which are every test's limits.") from None

        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, min(LOOK_S, limit_s), min(LOOK_S, limit_s))
    return is_set


def processor_s() -> float:
    """Processor time of this process and its descendants, those that have ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))  # its own and those of children that have ended
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(autouse=True)
def _logs_stay_as_they_were() -> Iterator[None]:
    """A test that sets up logs sets them up for itself."""
    logger, hooks = logging.getLogger("rota"), (sys.excepthook, sys.unraisablehook, threading.excepthook)
    before = logger.handlers, logger.propagate, logger.level
    yield
    sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])
    logging.captureWarnings(False)


def reason_of(item: pytest.Item) -> str | None:
    """Why a test takes long: `@pytest.mark.long("…")`."""
    mark = item.get_closest_marker("long")
    return None if mark is None else str(mark.args[0])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--files-in-order", type=int, metavar="SEED", help="run the files of tests in another order")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """All modules and tests stay until the end, so no collection of garbage visits them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--files-in-order")) is not None:
        place = {path: random.Random(f"{seed} {path}").random() for path in {item.path for item in items}}
        items.sort(key=lambda item: place[item.path])


def pytest_itemcollected(item: pytest.Item) -> None:
    if reason := reason_of(item):
        item.user_properties.append(("long", reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What takes long, and why: tests that were left out, or those that ran and how long they took."""
    stats = terminalreporter.stats
    left_out = [(item.nodeid, reason) for item in stats.get("deselected", []) if (reason := reason_of(item))]
    if left_out:
        terminalreporter.section(f"{len(left_out)} long tests were left out; `make test-long` runs them")
        for name, reason in left_out:
            terminalreporter.line(f"{name}: {reason}")
    reports = [report for outcome in ("passed", "failed") for report in stats.get(outcome, ()) if report.when == "call"]
    long = [(report, reason) for report in reports if (reason := dict(report.user_properties).get("long"))]
    if long:
        terminalreporter.section("long tests")
        for report, reason in long:
            terminalreporter.line(f"{report.duration:6.1f} s  {report.outcome}  {report.nodeid}: {reason}")
