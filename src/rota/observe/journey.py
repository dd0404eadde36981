"""A journey is an open request: whose it is, where it is counted, and what became of it so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rota.core.events import Finished
from rota.core.ids import AdapterId, RequestId
from rota.observe.meters import AdapterMeters


@dataclass(slots=True)
class Journey:
    adapter_id: AdapterId
    label: str  # the adapter's name, also where it is counted as one of the others
    asked_at: float
    meters: AdapterMeters
    owner: str = ""  # the name of the key that asked
    call: str = ""  # the client's own name for the call it belongs to
    admitted_at: float | None = None
    reasons: tuple[str, ...] = ()  # what it waited for
    first_at: float | None = None
    last_at: float = 0.0
    tokens: int = 0


# Hears of every end, with the journey that led there.
OnEnd = Callable[[RequestId, Journey, Finished], None]
