"""What an engine's start has tried out goes to the supervisor, which tells the next engine before that builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rota.core.trials import Trial

# A process builds one device, so there is one list of each for the whole process.
_known: list[Trial] = []
_made: list[Trial] = []


def build_with(trials: tuple[Trial, ...], build_device: Callable[[], Any]) -> Any:
    """Build a device that need not try out what an engine before it has tried out."""
    know_trials(trials)
    return build_device()


def know_trials(trials: tuple[Trial, ...]) -> None:
    """An engine before this one has made these."""
    _known[:] = trials


def known_trials() -> tuple[Trial, ...]:
    return tuple(_known)


def tell_trials(trials: tuple[Trial, ...]) -> None:
    """The code that builds a device has made these, or known them."""
    _made[:] = trials


def made_trials() -> tuple[Trial, ...]:
    return tuple(_made)
