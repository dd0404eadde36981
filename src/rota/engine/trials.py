"""Trials remember what the start of an engine has timed, so that a restart on the same machine times nothing again."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rota.core.stages import Choice, Trial

_in_use: ContextVar[Trials | None] = ContextVar("trials", default=None)


class Trials:
    """Choices by name. The machine is a part of each name: another one times for itself."""

    def __init__(self, known: Iterable[Trial] = (), machine: str | None = None) -> None:
        self._machine = machine or platform.node()
        self._choices = {trial.name: trial.choice for trial in known}

    @property
    def made(self) -> tuple[Trial, ...]:
        return tuple(Trial(name, choice) for name, choice in self._choices.items())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block, `chosen` asks these."""
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    def choose(self, name: str, find: Callable[[], Choice], fits: Callable[[Choice], bool]) -> Choice:
        full = f"{self._machine}: {name}"
        if full not in self._choices or not fits(self._choices[full]):
            self._choices[full] = find()
        return self._choices[full]


def chosen(name: str, find: Callable[[], Choice], fits: Callable[[Choice], bool]) -> Choice:
    """What was chosen before under this name, if it still fits; else what `find` finds by timing."""
    trials = _in_use.get()
    return find() if trials is None else trials.choose(name, find, fits)
