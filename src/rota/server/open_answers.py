"""Answers that are being made now, by the names their clients know: to be asked about, or called off."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.ids import RequestId
from rota.core.request import Request
from rota.server.access.keys import Key
from rota.server.streams import Reply

# No name holds it: see `names`.
_BEHIND_NAME = "#"
_serials = itertools.count(1)


def request_id_for(name: str) -> RequestId:
    """What the engine calls a request of this name; never the same twice.

    A client may leave and come back with the same name at once: what the engine still has to say of its first request
    must not be taken for news of the second.
    """
    return RequestId(f"{name}{_BEHIND_NAME}{next(_serials)}")


def name_of(request: Request) -> str:
    """The name a request was made for."""
    return request.request_id.partition(_BEHIND_NAME)[0]


@dataclass(frozen=True, slots=True)
class Call:
    """Who calls, and under which name the answer can be asked about."""

    key: Key
    name: str


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """One call that is being answered."""

    call: Call
    answer_id: str
    requests: tuple[Request, ...]
    reply: Reply

    @property
    def names(self) -> set[str]:
        """All it is found by: the client's own name, the answer's id, and those of its requests."""
        return {self.call.name, self.answer_id, *map(name_of, self.requests)}

    def call_off(self, name: str | None = None) -> None:
        """End it early, or only the one of its requests that has this name; its client hears that."""
        names = [name_of(request) for request in self.requests]
        is_one_of_many = name in names and name not in (self.call.name, self.answer_id)
        self.reply.call_off(names.index(name) if name and is_one_of_many else None)


class OpenAnswers:
    """A name is open once at a time and key, and may be used again when its answer has ended.

    Two keys may use the same name: a refusal would tell each of them what the other calls its requests.
    """

    def __init__(self, on_open: Callable[[OpenAnswer], None] = lambda _: None) -> None:
        self._by_name: dict[tuple[str, str], OpenAnswer] = {}  # by its key's name, and its own
        self._on_open = on_open

    def __iter__(self) -> Iterator[OpenAnswer]:
        """Each once, in the order they came."""
        return iter({id(answer): answer for answer in self._by_name.values()}.values())

    def find(self, key: Key, name: str) -> OpenAnswer | None:
        """One of the key's own; for an operator, who may have none of that name, anybody's."""
        found = self._by_name.get((key.name, name))
        if found is None and key.may_operate:
            return next((answer for (_, other), answer in self._by_name.items() if other == name), None)
        return found

    def check_free(self, key: Key, names: set[str]) -> None:
        """Raises RequestError if the key has one of the names open."""
        for name in names:
            if (key.name, name) in self._by_name:
                message = f"A request with the id '{name}' is still open; take another, or wait for its end."
                raise RequestError(Fault(FaultCode.DUPLICATE_ID, message))

    def add(self, answer: OpenAnswer) -> None:
        self._by_name.update({(answer.call.key.name, name): answer for name in answer.names})
        self._on_open(answer)

    def remove(self, answer: OpenAnswer) -> None:
        for name in answer.names:
            self._by_name.pop((answer.call.key.name, name), None)
