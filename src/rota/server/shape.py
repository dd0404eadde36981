"""A shape writes an answer for its client: whole, or as the packets of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from rota.core.errors import Fault
from rota.server.answer import Answer, Part
from rota.server.errors import error_body
from rota.server.sse import DONE, WAITING, sse_event


class Shape(Protocol):
    """What `respond` needs of a route."""

    media_type: str  # of a stream

    def packet(self, answer: Answer, parts: Sequence[Part]) -> bytes:
        """The news of one step, or empty bytes for news that are not shown. Without parts, a sign of life."""
        ...

    def ending(self, answer: Answer) -> bytes:
        """The end of a stream whose answer is complete."""
        ...

    def failure(self, fault: Fault) -> bytes:
        """The end of a stream whose answer failed."""
        ...

    def whole(self, answer: Answer, parts: Sequence[Part]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


@runtime_checkable
class Hears(Protocol):
    """A shape that hears an answer that is not streamed as it comes; its `whole` then gets no parts."""

    def hear(self, part: Part) -> None: ...


class DataEvents(ABC):
    """A stream of events that have data and no name, and end in `[DONE]`."""

    media_type = "text/event-stream"

    @abstractmethod
    def event(self, answer: Answer, part: Part) -> bytes:
        """One event as JSON. Empty bytes: nothing to send."""

    @abstractmethod
    def last_event(self, answer: Answer) -> bytes | None:
        """The last event as JSON, if there is one."""

    def packet(self, answer: Answer, parts: Sequence[Part]) -> bytes:
        if not parts:
            return WAITING
        events = (self.event(answer, part) for part in parts)
        return b"".join([sse_event(event) for event in events if event])

    def ending(self, answer: Answer) -> bytes:
        return (sse_event(last) if (last := self.last_event(answer)) else b"") + DONE

    def failure(self, fault: Fault) -> bytes:
        return sse_event(msgspec.json.encode(error_body(fault))) + DONE


class OnlyWhole(ABC):
    """The answers of a route that streams nothing. They may be large, and are written in a thread."""

    media_type = "application/json"

    @abstractmethod
    def whole(self, answer: Answer, parts: Sequence[Part]) -> bytes:
        """The body."""

    def packet(self, _answer: Answer, _parts: Sequence[Part]) -> bytes:
        raise AssertionError("this answer is not streamed")

    def ending(self, _answer: Answer) -> bytes:
        raise AssertionError("this answer is not streamed")

    def failure(self, _fault: Fault) -> bytes:
        raise AssertionError("this answer is not streamed")
