"""A network that breaks between front and engine ends what was open there, and the engine is started again."""

from __future__ import annotations

import pytest

from rota.core.events import FinishReason
from rota.runtime.timeouts import EngineTimeouts
from tests.builders import submit
from tests.processes import is_alive
from tests.runtime.remote.elsewhere import Elsewheres
from tests.runtime.remote.relay import relays
from tests.runtime.services import LONG, SLOW, supervised

EVENTS, MESSAGES = 0, 1  # which relay: the front's address is told first


@pytest.mark.parametrize(
    ("what", "line", "reason"),
    [
        ("cut", EVENTS, "The connection to the engine on 127.0.0.1 broke."),
        ("cut", MESSAGES, "The connection to the engine on 127.0.0.1 broke."),
        ("hold", EVENTS, "The engine hung: it said nothing for 2 seconds."),
    ],
)
def test_a_line_that_breaks_is_not_mended(what, line, reason):
    with relays() as between:
        elsewheres = Elsewheres(between.detour)
        with supervised(SLOW, EngineTimeouts(silence_s=2.0), elsewheres.new_engine) as (service, listener):
            service.send(submit("lost", max_new_tokens=LONG))
            listener.wait_for_tokens("lost")
            first = service.engine_pid
            getattr(between.all[line], what)()

            assert listener.wait_for_ending("lost").fault.message.startswith(reason)
            service.send(submit("again"))
            assert listener.wait_for_ending("again").reason is FinishReason.LENGTH
            assert not is_alive(first)
