"""Waiting for what must come, and no longer than a slow and busy machine may need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.processes import Program

# For whatever must come: only a test that fails waits so long. It is less than a test may take by the clock, so
# that the test itself says what has not come.
TIMEOUT_S = 900.0


def until(is_so: Callable[[], bool], within_s: float = TIMEOUT_S) -> bool:
    """Whether something comes true in time."""
    ends_at = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > ends_at:
            return False
        time.sleep(0.01)  # between two looks; a condition that tells of itself is waited for otherwise
    return True


def hang() -> None:
    """Never returns."""
    threading.Event().wait()


def line_of(process: Program, beginning: str = "", within_s: float = TIMEOUT_S) -> str:
    """The next line a process says, or the next that begins so; one that does not say it in time is killed."""
    assert process.stdout is not None
    timer = threading.Timer(within_s, process.kill)
    timer.start()
    try:
        line = next((line for line in iter(process.stdout.readline, "") if line.startswith(beginning)), None)
    finally:
        timer.cancel()
    assert line is not None, (
        f"{process.args!r} said no line '{beginning}…' within {within_s:g} seconds or before its end"
    )
    return line
