"""A body is read where its size says: on the event loop, in a thread, or in the reading room.

Reading a body means: parse it, check its fields, render its conversation and make tokens. All but the last step hold
the interpreter's lock, so a thread does not help against large bodies: the tokens of other clients would wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from rota.server.access.keys import Key
from rota.server.prompts import Texts
from rota.server.reading_room import ReadingRoom

Result = TypeVar("Result", bound="NamesModels")
# A function of a module, so that another process finds it by its name. Its result is small, or bytes.
Work = Callable[[Texts, bytes], Result]

# Fields, and the names of models that they hold. No name: the base model.
AskedModels = tuple[tuple[str, str | None], ...]


class NamesModels(Protocol):
    """What is read of a body that names models."""

    @property
    def asked_models(self) -> AskedModels:
        """The models that it names."""
        ...


# Up to this size a body is read on the event loop, in at most 2 ms, because a thread would cost more.
INLINE_BYTES = 4096
# A short body with this field may hold hundreds of words, and each takes 50 µs to tokenize.
SLOW_FIELD = b'"bad_words"'
# Above this size, or with more objects than this, a body goes to the reading room. Reading the largest body below
# holds the interpreter's lock for about 2 ms, mostly for its messages; its tokens are made without the lock.
LARGE_BYTES = 32 * 1024
LARGE_OBJECTS = 64


def is_large(raw: bytes) -> bool:
    return len(raw) > LARGE_BYTES or raw.count(b"{") > LARGE_OBJECTS


async def read(texts: Texts, room: ReadingRoom | None, key: Key, work: Work[Result], raw: bytes) -> Result:
    """Read a body. Raises RequestError if it is refused, or if too many large bodies wait."""
    if room is not None and is_large(raw):
        return await room.read(key, work, texts.limits, raw, texts.parsers)
    if len(raw) <= INLINE_BYTES and SLOW_FIELD not in raw:
        return work(texts, raw)
    return await asyncio.to_thread(work, texts, raw)
