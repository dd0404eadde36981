"""Mail is a heap of messages that will come; messages of the same time keep their order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import count

from rota.core.messages import Message

Stream = Iterator[tuple[float, Message]]


class Mail:
    """Messages, each with the moment at which it comes."""

    def __init__(self, messages: Iterable[tuple[float, Message]] = ()) -> None:
        self._order = count()
        self._heap: list[tuple[float, int, Message, Stream | None]] = []
        for at, message in messages:
            self.post(at, message)

    @property
    def next_at(self) -> float:
        """When the next message comes."""
        return self._heap[0][0] if self._heap else math.inf

    def post(self, at: float, message: Message) -> None:
        """A message will come at `at`."""
        heapq.heappush(self._heap, (at, next(self._order), message, None))

    def follow(self, stream: Stream) -> None:
        """Messages will come from a stream; the next one is taken when the one before it has come."""
        for at, message in stream:
            heapq.heappush(self._heap, (at, next(self._order), message, stream))
            return

    def take(self, until: float) -> list[Message]:
        """All messages that have come by then."""
        due: list[Message] = []
        while self._heap and self._heap[0][0] <= until:
            _, _, message, stream = heapq.heappop(self._heap)
            due.append(message)
            if stream:
                self.follow(stream)
        return due
