"""The front is what every route stands on: the service and its streams, names, keys and open answers."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request as HttpRequest

from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.server.access.access import Access
from rota.server.names import name_in
from rota.server.open_answers import Call, OpenAnswers
from rota.server.streams import Streams
from rota.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Front:
    """Made once, where the application is."""

    service: Service
    streams: Streams
    tokenizer: Tokenizer
    registry: Registry
    access: Access
    answers: OpenAnswers
    keep_alive_s: float
    request_timeout_s: float | None = None
    # Whatever is asked waits first, if only until the next step. None: as many as come.
    max_queued_requests: int | None = None

    def identify(self, http: HttpRequest) -> Call:
        """Who calls a route that generates; raises RequestError for a key that is wrong or has used up its minute."""
        key = self.access.key_of(http)
        self.access.charge_request(key)
        return Call(key, name_in(http))
