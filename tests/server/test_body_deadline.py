"""A body has time while it comes, and expires when it rests, however fast it came before."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import cast

import pytest

from rota.server.door.connection import BYTES_PER_S, BodyDeadline


class Clock:
    """An event loop with one timer, and a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._due = (self.now + delay_s, call)

    def pass_by(self, until: float) -> None:
        while self._due and self._due[0] <= until:
            (self.now, call), self._due = self._due, None
            call()
        self.now = until


class Body:
    def __init__(self, is_answered: bool = False) -> None:
        self.clock, self.late_at = Clock(), list[float]()
        self.is_held = False
        self.deadline = BodyDeadline(
            cast(AbstractEventLoop, self.clock),
            30.0,
            lambda: is_answered,
            lambda: self.is_held,
            lambda: self.late_at.append(self.clock.now),
        )
        self.deadline.start()


def test_a_body_that_rests_expires_however_much_of_it_came():
    body = Body()
    body.deadline.add(1000 * BYTES_PER_S)
    body.clock.pass_by(1000.0)
    assert body.late_at == [60.0]


@pytest.mark.parametrize(("bytes_per_s", "is_late"), [(BYTES_PER_S, False), (BYTES_PER_S // 2, True)])
def test_a_body_that_comes_steadily_has_time_unless_it_is_too_slow(bytes_per_s, is_late):
    body = Body()
    for second in range(1, 1000):
        body.deadline.add(bytes_per_s)
        body.clock.pass_by(float(second))
    assert bool(body.late_at) == is_late


def test_bytes_that_come_after_the_answer_give_no_time_and_a_server_that_does_not_read_takes_none():
    answered, held = Body(is_answered=True), Body()
    answered.deadline.add(1000 * BYTES_PER_S)
    answered.clock.pass_by(100.0)
    assert answered.late_at == [30.0]
    held.is_held = True
    held.clock.pass_by(100.0)
    assert not held.late_at
