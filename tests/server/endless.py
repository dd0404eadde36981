"""A device whose answers go on until a test lets them end, in a module that an engine's process imports quickly."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rota.core.capacity import Capacity
from tests.builders import capacity
from tests.fakes import FakeDevice, NextToken

# Tokens of an answer that ends only because the test lets it, or because it is called off.
ENDLESS = 10**6


def endless_room(**room: Any) -> Capacity:
    """It sees the last letters alone, so that no step costs more than the one before."""
    return capacity(max_sequence_tokens=2 * ENDLESS, window=16, **room)


def after(tokens: Sequence[int]) -> int:
    """The next letter of the alphabet."""
    return ord("a") + (tokens[-1] - ord("a") + 1) % 26


@dataclass
class EndlessDevice(FakeDevice):
    """Goes on with the alphabet until it may end, however long that takes; the engine hears messages meanwhile."""

    capacity: Capacity = field(default_factory=endless_room)
    step_s: float = 0.01
    next_token: NextToken = after


def endless_device(may_end: Callable[[], bool] = lambda: False, **room: Any) -> FakeDevice:
    return EndlessDevice(endless_room(**room), next_token=lambda tokens: 2 if may_end() else after(tokens))


def mortal_device(folder: Path) -> FakeDevice:
    """Its answers may end once there is a file "go", and its engine does not come back once there is a file "doom"."""
    if (folder / "doom").exists():
        os._exit(9)
    return endless_device((folder / "go").exists)
