"""The key watch reads the key file again when the file changes or a signal asks for it; bad keys change nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from rota.core.errors import ConfigError
from rota.observe.audit import log_keys, log_refused_keys
from rota.server.access.access import Access
from rota.server.access.key_file import read_keys
from rota.server.access.keys import KeyRing

LOOK_EVERY_S = 1.0

# When a file was last written, and which file it is: a new file under the old name is a change too.
Stamp = tuple[int, ...] | None


class KeySource:
    """Where a server's keys come from: --api-key and --api-key-file."""

    def __init__(self, secrets: Sequence[str], path: str | None, adapter_root: str | None = None) -> None:
        """`adapter_root` is the server's."""
        self.path = path
        self._secrets, self._adapter_root = secrets, adapter_root
        self._stamp: Stamp = None
        self._is_asked = False

    def read(self) -> KeyRing:
        """The keys as they are now. Raises ConfigError. Blocks on the disk."""
        self._is_asked = False
        self._stamp = self._stamp_now()  # before the read: a write during the read is a change
        return read_keys(self._secrets, self.path, self._adapter_root)

    def ask(self) -> None:
        """Have the file read again soon, changed or not. May be called by a signal handler."""
        self._is_asked = True

    def cause_to_read(self) -> str:
        """Why the file is to be read again, or an empty text. Blocks on the disk."""
        if self._is_asked:
            return "SIGHUP"
        return "the key file changed" if self.has_changed() else ""

    def has_changed(self) -> bool:
        """Whether the file was written since the last read. Blocks on the disk."""
        return self._stamp_now() != self._stamp

    def _stamp_now(self) -> Stamp:
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)


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
