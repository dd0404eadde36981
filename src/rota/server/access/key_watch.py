"""The key watch reads the key file again when the file changes or a signal asks for it; bad keys change nothing."""

from __future__ import annotations

import asyncio

from rota.core.errors import ConfigError
from rota.observe.audit import log_keys, log_refused_keys
from rota.server.access.access import Access
from rota.server.access.key_source import KeySource
from rota.server.access.keys import KeyRing

LOOK_EVERY_S = 1.0


class KeyWatch:
    """Gives the server new keys while it runs. Open requests go on to their end, also those of a removed key."""

    def __init__(self, source: KeySource, access: Access, every_s: float = LOOK_EVERY_S) -> None:
        self._source, self._access, self._every_s = source, access, every_s

    async def run(self) -> None:
        """Look until cancelled. The disk is read in a thread: a slow one delays no request."""
        while True:
            await asyncio.sleep(self._every_s)
            if cause := await asyncio.to_thread(self._source.cause_to_read):
                await self._take_over(cause)

    async def _take_over(self, cause: str) -> None:
        keys, refusal = await asyncio.to_thread(self._read)
        if keys is None and not refusal:
            return
        if keys is None:
            log_refused_keys(refusal, cause)
            return
        changes = self._access.replace_keys(keys)
        log_keys(changes.added, changes.removed, changes.changed, cause)

    def _read(self) -> tuple[KeyRing | None, str]:
        """The keys, or the reason against them; neither if the file was written meanwhile, for the next look."""
        keys, refusal = None, ""
        try:
            keys = self._source.read()
        except ConfigError as error:
            refusal = str(error)
        return (None, "") if self._source.has_changed() else (keys, refusal)
