"""What something costs, on machines of any speed."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


def calls_in(act: Callable[[], Outcome]) -> tuple[int, Outcome]:
    """How many of Python's functions were called, and what came of it."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    # Collecting garbage calls functions too: hypothesis asks to be told of it. So does the clock of a test's limit.
    was_on, signals = gc.isenabled(), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    gc.disable()
    sys.setprofile(count)
    try:
        outcome = act()
    finally:
        sys.setprofile(None)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        if was_on:
            gc.enable()
    return calls, outcome
