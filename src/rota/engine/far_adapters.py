"""Adapters of which some come from sources: what is told of one that cannot be read says whether that may pass.

A source that was away may answer the next time, and a disk that was full may have room. All other failures are the
adapter's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rota.core.adapter import Adapter
from rota.core.errors import AdapterChangedError, DiskError, FaultCode
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, Message
from rota.engine.lora.adapters import Adapters
from rota.engine.lora.bank import Bank
from rota.engine.lora.host import HostAdapter
from rota.sources.address import has_scheme
from rota.sources.source import UnreachableError

Read = Callable[[Adapter], HostAdapter]


def checked_first(read: Read, refuse: Callable[[Adapter], None]) -> Read:
    """Adapters of sources are refused by their config and headers, if these are wrong, before they are downloaded.

    A source that breaks off, or a disk without room for headers, is left to the download: it tries again, and tells.
    """

    def read_checked(adapter: Adapter) -> HostAdapter:
        if has_scheme(adapter.path):
            with suppress(UnreachableError, OSError):
                refuse(adapter)
        return read(adapter)

    return read_checked


class Causes:
    """Knows which reads wait for a source, or failed of what may pass, from any thread.

    A read that fails, or is given up on while it waits, is told of before another read of the same adapter begins.
    """

    def __init__(self) -> None:
        self._codes: dict[AdapterId, FaultCode] = {}

    def noting(self, read: Read) -> Read:
        def read_and_note(adapter: Adapter) -> HostAdapter:
            if has_scheme(adapter.path):
                self._codes[adapter.adapter_id] = FaultCode.SOURCE_AWAY
            try:
                copy = read(adapter)
            except UnreachableError:
                raise
            except (DiskError, AdapterChangedError) as error:
                self._codes[adapter.adapter_id] = error.code
                raise
            except Exception:  # whatever it is, it goes on
                self._codes.pop(adapter.adapter_id, None)
                raise
            self._codes.pop(adapter.adapter_id, None)
            return copy

        return read_and_note

    def with_code(self, message: Message) -> Message:
        if not isinstance(message, AdapterFailed) or message.adapter_id not in self._codes:
            return message
        return replace(message, code=self._codes.pop(message.adapter_id))


class FarAdapters(Adapters):
    """As other adapters; only what is told of failures is more."""

    def __init__(self, bank: Bank, read: Read, *others: Any) -> None:
        self._causes = Causes()
        super().__init__(bank, self._causes.noting(read), *others)

    def listen(self, post: Callable[[Message], None]) -> None:
        super().listen(lambda message: post(self._causes.with_code(message)))
