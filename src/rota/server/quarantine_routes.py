"""Routes for operators: which adapters engines died of, and which keys may load nothing for that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import EngineRestarted, Event
from rota.observe.audit import log_act
from rota.observe.metrics import Metrics
from rota.runtime.blame import Blame, Quarantine
from rota.server.access.access import Access
from rota.server.audit import audited
from rota.server.docs import gives


class QuarantinedBody(BaseModel):
    """An adapter, the key that loaded it, since when (seconds since 1970), and why."""

    name: str
    key: str | None
    since: float
    reason: str


class QuarantineBody(BaseModel):
    """The quarantined adapters, and the keys that may load nothing until that right is given back."""

    adapters: list[QuarantinedBody]
    keys: list[str]


class LiftedBody(BaseModel):
    """What may be loaded again, or who may load again."""

    name: str


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


def quarantine_log(blame: Blame, metrics: Metrics) -> QuarantineLog:
    """For the events of a server; its metrics count what is quarantined."""
    metrics.quarantined = lambda: len(blame.quarantines)
    return QuarantineLog(blame)


def quarantine_body(blame: Blame) -> dict[str, Any]:
    return {"adapters": [_shown(one) for one in blame.quarantines], "keys": list(blame.barred)}


def _shown(one: Quarantine) -> dict[str, Any]:
    return {"name": one.name, "key": one.owner, "since": one.since, "reason": one.reason}


def install_quarantine_routes(app: FastAPI, access: Access) -> None:
    blame = access.blame

    @app.get("/v1/quarantine", responses=gives(QuarantineBody))
    async def show(http: Request) -> dict[str, Any]:
        """The adapters that are not served because engines died of them, and the keys that lost `may_load`."""
        access.operator_of(http)
        return quarantine_body(blame)

    @app.delete("/v1/quarantine/adapters/{name:path}", responses=gives(LiftedBody))
    async def lift(name: str, http: Request) -> dict[str, str]:
        """Lift the quarantine of an adapter: it may be loaded again."""
        with audited(http, access.key_of(http), "lift_quarantine", adapter=name):
            access.operator_of(http)
            if not blame.lift(name):
                raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, f"'{name[:200]}' is not quarantined.", "name"))
        return {"name": name}

    @app.delete("/v1/quarantine/keys/{name}", responses=gives(LiftedBody))
    async def give_back(name: str, http: Request) -> dict[str, str]:
        """Give a key its right to load adapters back."""
        with audited(http, access.key_of(http), "give_back_may_load", of=name):
            access.operator_of(http)
            if not blame.give_back(name):
                raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, f"Key '{name[:200]}' has lost no right.", "name"))
        return {"name": name}
