"""Messages tell the scheduler what happened."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.ids import RequestId
from rota.core.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Somebody asks."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Somebody no longer wants an answer. Unknown ids are ignored: the answer may have crossed it."""

    request_id: RequestId
    at: float


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Nobody wants an answer any more: the service is stopping."""

    at: float


Message = Submit | Abort | AbortAll
