"""Work on the side is done by a thread of its own, so that the event loop does not wait for it."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from rota.core.events import Finished
from rota.core.ids import RequestId
from rota.observe.journey import Journey, OnEnd

# Ends that may wait. A thread that falls behind so far misses some.
MOST_WAITING = 10_000


class Aside:
    """Tells `on_end` of every end, a little later and in the same order."""

    def __init__(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._waiting: queue.Queue[tuple[RequestId, Journey, Finished] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="rota-traces", daemon=True)
        self._thread.start()

    def end(self, request_id: RequestId, journey: Journey, ending: Finished) -> None:
        """Does not wait: an end that finds no place is dropped."""
        with suppress(queue.Full):
            self._waiting.put_nowait((request_id, journey, ending))

    def close(self) -> None:
        """Wait until all ends have been told."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while ended := self._waiting.get():
            self._on_end(*ended)
