"""A key source is where a server's keys come from, and knows when they have to be read again."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rota.server.access.key_file import read_keys
from rota.server.access.keys import KeyRing

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
