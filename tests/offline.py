"""An offline inbox has all requests at the start: it feeds the loop and closes when the last request has ended."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterable

from rota.core.adapter import Adapter
from rota.core.errors import StuckError
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter, Message
from rota.core.request import Request
from rota.runtime.doorbell import Doorbell

# The inbox waits only for adapters that are being read, and no disk is slower than this.
TIMEOUT_S = 300.0


class OfflineInbox:
    """All methods but `post` are for the loop's own thread; the receiver of events calls `note_ended`."""

    def __init__(
        self,
        requests: Iterable[Request] = (),
        max_open: int = 1,
        adapters: Iterable[Adapter] = (),
        doorbell: Doorbell | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """At most `max_open` requests are open at a time, so that none is refused for a full queue.

        An adapter's copy may end after its run: one doorbell for all runs keeps its message.
        """
        self._unsent = deque(requests)
        self._max_open = max_open
        self._timeout_s = timeout_s
        self._messages: list[Message] = [AddAdapter(adapter=adapter, at=time.monotonic()) for adapter in adapters]
        self._open: set[RequestId | AdapterId] = {adapter.adapter_id for adapter in adapters}
        self._doorbell = doorbell or Doorbell()

    def post(self, message: Message) -> None:
        self._doorbell.post(message)

    def abort(self, request_id: RequestId) -> None:
        """Abort a request; it still ends with an event."""
        self._messages.append(Abort(request_id, time.monotonic()))

    def note_ended(self, ended: RequestId | AdapterId) -> None:
        """A request has ended, or an adapter was added or refused."""
        self._open.remove(ended)

    def close(self) -> None:
        """Drop all requests that have not ended."""
        self._unsent.clear()
        self._open.clear()
        self._messages.clear()

    def take(self, wait_s: float) -> list[Message] | None:
        while self._unsent and len(self._open) < self._max_open:
            request = self._unsent.popleft()
            self._open.add(request.request_id)
            self._messages.append(request)
        if not self._messages:
            if not self._open:
                return None
            ready, _, _ = select.select([self._doorbell], [], [], min(wait_s, self._timeout_s))
            if not ready and wait_s > self._timeout_s:
                raise StuckError(f"{len(self._open)} requests wait, but no message comes; this is a bug in Rota.")
        messages, self._messages = self._messages + self._doorbell.take(), []
        return messages
