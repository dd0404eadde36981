"""A pause stops the steps while requests stay open, and tells once the last step has ended."""

from __future__ import annotations

from collections.abc import Callable

from rota.core.events import Explained, Finished, FinishReason, PauseChanged, Whereabouts
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request
from rota.scheduler.books import Books
from rota.scheduler.reasons import Reason


class Pauses:
    """While the steps stand still, `Books.paused_at` says since when.

    A pause that drains holds new requests here, out of every queue: no policy may give a slot to a request that cannot
    start, or open requests would wait for it. Once all open requests have ended, the steps stand still, and the held
    requests wait like all others.
    """

    def __init__(self, books: Books, take: Callable[[Request], None]) -> None:
        """`take` lets a request wait in its queue, or refuses it."""
        self._books = books
        self._take = take
        self.held: dict[RequestId, Request] = {}
        self.is_draining = False
        self._is_awaited = False  # an operator waits to hear that no step is in flight

    def begin(self, at: float, is_drained: bool) -> None:
        """Stand still from now on, or drain first. The newest order counts."""
        self.is_draining, self._is_awaited = is_drained, True
        self._books.paused_at = None if is_drained else at
        if not is_drained:
            self._let_all_in()

    def end(self, at: float) -> None:
        self.is_draining = self._is_awaited = False
        self._books.paused_at = None
        self._let_all_in()
        self._tell(at, is_paused=False)

    def settle(self, at: float, is_quiet: bool) -> None:
        """A step was committed. `is_quiet`: no other is in flight."""
        if self.is_draining and is_quiet and not self._books.sequences:
            self.begin(at, is_drained=False)
        if self._is_awaited and is_quiet and not self.is_draining:
            self._is_awaited = False
            self._tell(at, is_paused=True)

    def hold(self, request: Request) -> None:
        """A request comes while others drain."""
        self.held[request.request_id] = request

    def let_in(self, adapter_id: AdapterId) -> None:
        """The held requests of one adapter count as open from now on."""
        for request in [one for one in self.held.values() if one.adapter_id == adapter_id]:
            self._take(self.held.pop(request.request_id))

    def end_held(self, request_id: RequestId, reason: FinishReason, at: float) -> None:
        """Ids that are not held are ignored."""
        if request := self.held.pop(request_id, None):
            prompt_tokens = len(request.prompt)
            ended = Finished(request_id=request_id, at=at, reason=reason, prompt_tokens=prompt_tokens)
            self._books.outbox.append(ended)

    def end_all_held(self, at: float) -> None:
        for request_id in list(self.held):
            self.end_held(request_id, FinishReason.ABORT, at)

    def explain_held(self, request_id: RequestId, at: float) -> Explained | None:
        if (request := self.held.get(request_id)) is None:
            return None
        reason, since = Reason.PAUSED.value, request.arrived_at
        return Explained(request_id=request_id, at=at, state=Whereabouts.WAITING, reason=reason, since=since)

    def _let_all_in(self) -> None:
        held, self.held = self.held, {}
        for request in held.values():
            self._take(request)

    def _tell(self, at: float, is_paused: bool) -> None:
        self._books.outbox.append(PauseChanged(at, is_paused, self._books.engine_id))
