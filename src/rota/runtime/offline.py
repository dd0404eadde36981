"""An inbox for work that is all known at the start: it feeds the loop and closes when the last request has ended."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable

from rota.core.errors import StuckError
from rota.core.ids import RequestId
from rota.core.messages import Abort, Message, Submit
from rota.core.request import Request


class OfflineInbox:
    """Used by the loop's own thread only: whoever is called with events says here what has ended."""

    def __init__(self, requests: Iterable[Request], max_open: int) -> None:
        """At most `max_open` requests are handed over at a time, so that none is refused for a full queue."""
        self._unsent = deque(requests)
        self._max_open = max_open
        self._open: set[RequestId] = set()
        self._messages: list[Message] = []

    def abort(self, request_id: RequestId) -> None:
        """Have enough of a request; it still ends with an event."""
        self._messages.append(Abort(request_id, time.monotonic()))

    def note_ended(self, request_id: RequestId) -> None:
        self._open.remove(request_id)

    def close(self) -> None:
        """Give up whatever has not ended."""
        self._unsent.clear()
        self._open.clear()
        self._messages.clear()

    def take(self, wait_s: float) -> list[Message] | None:
        while self._unsent and len(self._open) < self._max_open:
            request = self._unsent.popleft()
            self._open.add(request.request_id)
            self._messages.append(Submit(request))
        if not self._messages:
            if not self._open:
                return None
            if wait_s == math.inf:
                raise StuckError(f"{len(self._open)} requests wait and nothing will ever come; this is a bug.")
            time.sleep(wait_s)
        messages, self._messages = self._messages, []
        return messages
