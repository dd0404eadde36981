"""Adapters of which some come from sources: what is told of one that cannot be read says whether its source was away.

Such a read may succeed the next time, and all other failures are the adapter's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rota.core.adapter import Adapter
from rota.core.errors import FaultCode
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, Message
from rota.engine.lora.adapters import Adapters
from rota.engine.lora.bank import Bank
from rota.engine.lora.host import HostAdapter
from rota.sources.address import has_scheme
from rota.sources.source import UnreachableError

Read = Callable[[Adapter], HostAdapter]


class Away:
    """Knows whose sources have not answered, from any thread.

    A read that fails, or is given up on while it waits, is told of before another read of the same adapter begins.
    """

    def __init__(self) -> None:
        self._waits: set[AdapterId] = set()

    def noting(self, read: Read) -> Read:
        def read_and_note(adapter: Adapter) -> HostAdapter:
            if not has_scheme(adapter.path):
                return read(adapter)
            self._waits.add(adapter.adapter_id)
            try:
                copy = read(adapter)
            except Exception as error:  # whatever it is, it goes on
                if not isinstance(error, UnreachableError):
                    self._waits.discard(adapter.adapter_id)
                raise
            self._waits.discard(adapter.adapter_id)
            return copy

        return read_and_note

    def with_code(self, message: Message) -> Message:
        if not isinstance(message, AdapterFailed) or message.adapter_id not in self._waits:
            return message
        self._waits.discard(message.adapter_id)
        return replace(message, code=FaultCode.SOURCE_AWAY)


class FarAdapters(Adapters):
    """As other adapters; only what is told of failures is more."""

    def __init__(self, bank: Bank, read: Read, *others: Any) -> None:
        self._away = Away()
        super().__init__(bank, self._away.noting(read), *others)

    def listen(self, post: Callable[[Message], None]) -> None:
        super().listen(lambda message: post(self._away.with_code(message)))
