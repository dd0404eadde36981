"""An act that changes the server for others is written to the audit log, also if it is refused or fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request

from rota.core.events import EngineRestarted, Event
from rota.observe.audit import log_act
from rota.runtime.blame import Blame
from rota.server.access.keys import Key


@contextmanager
def audited(http: Request, key: Key, action: str, **details: Any) -> Iterator[dict[str, Any]]:
    """Log what the block does, at its end. The block may add details."""
    client = client_of(http)
    try:
        yield details
    except BaseException as error:  # also CancelledError: every way out has its line
        log_act(action, key.name, client, str(error) or type(error).__name__, **details)
        raise
    log_act(action, key.name, client, **details)


def client_of(http: Request) -> str:
    """The address of a request's client."""
    return http.client.host if http.client else "unknown"


class QuarantineLog:
    """Writes a line to the audit log for every new quarantine."""

    def __init__(self, blame: Blame) -> None:
        self._blame = blame
        self._known = set(blame.quarantines)

    def observe(self, events: Iterable[Event]) -> None:
        if not any(isinstance(event, EngineRestarted) and event.died_of is not None for event in events):
            return
        for one in set(self._blame.quarantines) - self._known:
            self._known.add(one)
            may_load = one.owner not in self._blame.barred
            log_act(
                "quarantine", one.owner or "operator", "this server", one.reason, adapter=one.name, may_load=may_load
            )
