"""Open answers are found by name, so that a client can ask about one or cancel it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.ids import RequestId
from rota.core.request import Request
from rota.observe.journey import TraceHeaders
from rota.server.access.keys import Key
from rota.server.streams import CallReply
from rota.server.traffic.route import Chosen

# Names cannot contain this character: see `names`.
_SEPARATOR = "#"
_serials = itertools.count(1)


def request_id_for(name: str) -> RequestId:
    """A new engine id for a request of this name, never the same twice.

    A client may leave and come back at once with the same name. Then late events of its first request must not reach
    the second.
    """
    return RequestId(f"{name}{_SEPARATOR}{next(_serials)}")


def name_in_id(request_id: RequestId) -> str:
    """The name that an engine's id was made of."""
    return request_id.partition(_SEPARATOR)[0]


def name_of(request: Request) -> str:
    """The name of a request."""
    return name_in_id(request.request_id)


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """The caller's key, the name of the call, the trace that it is a part of, and when its first token is wanted."""

    key: Key
    name: str
    trace: TraceHeaders = ()
    first_token_s: float | None = None


class OpenAnswer:
    """What others may know of a call that is being answered, and how they end it."""

    reply: CallReply

    def __init__(
        self, caller: CallIdentity, answer_id: str, requests: tuple[Request, ...], chosen: tuple[Chosen, ...]
    ) -> None:
        """`chosen`: the adapter of each request, and why it is this one."""
        self.caller, self.answer_id = caller, answer_id
        self.requests, self.chosen = requests, chosen
        # All names that find it: the call's name, the answer's id, and the names of its requests.
        self.names = {caller.name, answer_id, *map(name_of, requests)}

    def cancel(self, name: str | None = None) -> None:
        """End it early, or only its request of this name. Its client gets an event that says so."""
        names = [name_of(request) for request in self.requests]
        is_one_of_many = name in names and name not in (self.caller.name, self.answer_id)
        self.reply.cancel(names.index(name) if name and is_one_of_many else None)


class OpenAnswers:
    """A key may use a name for one open answer at a time. When that answer has ended, the name is free again.

    Two keys may use the same name: a refusal would show one key the names of the other.
    """

    def __init__(self, on_open: Callable[[OpenAnswer], None] = lambda _: None) -> None:
        self._by_name: dict[tuple[str, str], OpenAnswer] = {}  # by the key's name and the answer's name
        self._on_open = on_open

    def __iter__(self) -> Iterator[OpenAnswer]:
        """Each answer once, in order of arrival."""
        return iter({id(answer): answer for answer in self._by_name.values()}.values())

    def find(self, key: Key, name: str) -> OpenAnswer | None:
        """The key's own answer of that name. If it has none, an operator gets another key's answer."""
        found = self._by_name.get((key.name, name))
        if found is None and key.may_operate:
            return next((answer for (_, other), answer in self._by_name.items() if other == name), None)
        return found

    def check_free(self, answer: OpenAnswer) -> None:
        """Raises RequestError if one of its names is open for its key."""
        for name in answer.names:
            if (answer.caller.key.name, name) in self._by_name:
                message = f"A request with the id '{name}' is still open; choose another id, or wait for its end."
                raise RequestError(Fault(FaultCode.DUPLICATE_ID, message))

    def add(self, answer: OpenAnswer) -> None:
        self._by_name.update({(answer.caller.key.name, name): answer for name in answer.names})
        self._on_open(answer)

    def remove(self, answer: OpenAnswer) -> None:
        for name in answer.names:
            self._by_name.pop((answer.caller.key.name, name), None)
