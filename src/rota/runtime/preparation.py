"""Requests wait outside the scheduler until their grammars are ready: a slow grammar makes nobody else late."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from rota.core.grammar import Grammar
from rota.core.ids import RequestId
from rota.core.messages import Abort, AbortAll, Message, Submit

# True: the function is called once the grammar is ready, from any thread. False: it is ready.
Prepare = Callable[[Grammar, Callable[[], None]], bool]


@dataclass(frozen=True, slots=True)
class Prepared(Submit):
    """A request that was held back; its grammar is ready."""


class Preparation:
    """For the loop's thread. A request keeps the time of its arrival, so it keeps its place."""

    def __init__(self, prepare: Prepare, post: Callable[[Message], None]) -> None:
        self._prepare = prepare
        self._post = post
        self._held: dict[RequestId, Submit] = {}

    def sift(self, messages: Iterable[Message]) -> list[Message]:
        """The messages that the scheduler shall hear now."""
        return [heard for message in messages for heard in self._heard(message)]

    def _heard(self, message: Message) -> Iterable[Message]:
        match message:
            case Prepared(request):
                return self._released(request.request_id)
            case Submit(request) if request.sampling.grammar is not None:
                if not self._prepare(request.sampling.grammar, partial(self._post, Prepared(request))):
                    return (message,)
                self._held[request.request_id] = message
                return ()
            case Abort(request_id):
                # The scheduler must know it first: every request ends with an event.
                return (*self._released(request_id), message)
            case AbortAll():
                held, self._held = self._held, {}
                return (*held.values(), message)
        return (message,)

    def _released(self, request_id: RequestId) -> Iterable[Submit]:
        """Nothing if its client has left meanwhile."""
        held = self._held.pop(request_id, None)
        return () if held is None else (held,)
