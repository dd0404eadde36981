"""A request is heard once its grammar is ready, and before whatever ends it; all others are heard at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rota.core.grammar import Grammar
from rota.core.messages import AbortAll, Message
from rota.runtime.live import Preparation
from tests.builders import abort, add_adapter, submit

GRAMMAR = Grammar("slow")


class Slow:
    """Grammars become ready when the test says so; one is ready from the start."""

    def __init__(self) -> None:
        self.posted: list[Message] = []
        self._waiting: list[Callable[[], None]] = []
        self.preparation = Preparation(self._prepare, self.posted.append)

    def _prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        if grammar.text == "ready":
            return False
        self._waiting.append(then)
        return True

    def ready(self) -> list[Message]:
        """All grammars are ready; what the loop hears next."""
        for then in self._waiting:
            then()
        self._waiting.clear()
        heard, self.posted[:] = self.preparation.sift(self.posted), []
        return heard


@pytest.fixture
def slow() -> Slow:
    return Slow()


def test_only_requests_whose_grammar_is_not_ready_wait(slow):
    held, ready = submit("held", grammar=GRAMMAR), submit("ready", grammar=Grammar("ready"))
    others = [submit("free"), ready, add_adapter(1), abort("free")]

    assert slow.preparation.sift([held, *others]) == others
    assert slow.ready() == [held]
    assert slow.ready() == []


def test_a_request_whose_client_leaves_is_heard_before_its_abort_and_never_again(slow):
    held = submit("held", grammar=GRAMMAR)
    slow.preparation.sift([held])

    assert slow.preparation.sift([abort("held")]) == [held, abort("held")]
    assert slow.ready() == []


def test_at_the_end_all_are_heard(slow):
    held = [submit(f"held{number}", grammar=GRAMMAR) for number in range(3)]
    slow.preparation.sift(held)

    assert slow.preparation.sift([AbortAll(1.0)]) == [*held, AbortAll(1.0)]
    assert slow.ready() == []
