"""Room is what the adapters of each key take of the server: bodies that arrive, bytes on its disks, and versions.

The key file may set limits. Without them a key takes no more of the disk, and of the versions that a server has at
most, than it leaves: so each key finds room, however much another has taken. What operators load is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.ids import AdapterId
from rota.server.access.keys import Key

# Bodies with weights that may arrive at a time. Keys that send at the same time share them, and each may send one.
MOST_UPLOADS = 8
# Of all keys together: each takes a thread.
MOST_THREADS = 64
# Versions that keys may have loaded together: each takes a kilobyte, and has its place in lists.
MOST_VERSIONS = 100_000


class KeyRoom:
    """For the event loop."""

    def __init__(self, key_named: Callable[[str], Key | None], free: Callable[[], int]) -> None:
        """`free` are the bytes that the disk for bodies has left."""
        self._key_named, self._free = key_named, free
        # By key:
        self._sending: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()  # of bodies that arrive, and of versions
        self._versions: Counter[str] = Counter()
        self._arriving: dict[str, tuple[str, int]] = {}  # by folder: whose, and the bytes
        self._taken: dict[AdapterId, tuple[str, int]] = {}

    @contextmanager
    def sending(self, key: Key) -> Iterator[None]:
        """A body may arrive. Raises RequestError if the key sends as many as it may now."""
        own, senders = self._sending[key.name], {*(+self._sending), key.name}
        share = max(1, MOST_UPLOADS // len(senders))
        if own >= min(share, key.max_uploads or share) or self._sending.total() >= MOST_THREADS:
            message = f"Key '{key.name}' sends {own} adapters already, as many as it may now; try again later."
            raise RequestError(Fault(FaultCode.QUEUE_FULL, message))
        self._sending[key.name] += 1
        try:
            yield
        finally:
            self._sending[key.name] -= 1

    def reserve(self, key: Key, folder: str, more: int) -> None:
        """Bytes of a body are about to be written. Raises RequestError if the key would take more than it may."""
        if key.may_operate:
            return
        self._check_bytes(key, more)
        own, left = self._bytes[key.name], self._free() - sum(size for _, size in self._arriving.values()) - more
        if own + more > left:
            taken = f"its adapters take {own:,} bytes, and this one {more:,}"
            raise _full(f"Key '{key.name}' would take more of the server's disk than it leaves to others: {taken}.")
        self._bytes[key.name] += more
        self._arriving[folder] = (key.name, self._arriving.get(folder, ("", 0))[1] + more)

    def release(self, folder: str) -> None:
        """A body has failed, or belongs to a version. Without a body in this folder nothing happens."""
        name, size = self._arriving.pop(folder, ("", 0))
        self._bytes[name] -= size

    def check_versions(self, key: Key) -> None:
        """Raises RequestError if a key may not have one more version."""
        if key.may_operate:
            return
        own = self._versions[key.name]
        if key.max_adapters is not None and own >= key.max_adapters:
            limit = f"{key.max_adapters:,} adapters, its max_adapters, and has {own:,}; kept versions count too"
            raise _full(f"Key '{key.name}' may load {limit}. Unload one first.")
        if own + 1 > MOST_VERSIONS - self._versions.total() - 1:
            raise _full(f"Key '{key.name}' has loaded {own:,} adapters, and others must find room too.")

    def take(self, adapter: Adapter, is_more: bool) -> None:
        """A version of its owner's begins. `is_more`: no other version leaves for it. Raises RequestError."""
        self.release(adapter.path)
        key = self._key_named(adapter.owner or "")
        if key is None or key.may_operate:
            return
        self._check_bytes(key, adapter.size_bytes)
        if is_more or (key.max_adapters is not None and self._versions[key.name] > key.max_adapters):
            self.check_versions(key)
        self._bytes[key.name] += adapter.size_bytes
        self._versions[key.name] += 1
        self._taken[adapter.adapter_id] = (key.name, adapter.size_bytes)

    def drop(self, adapter_id: AdapterId) -> None:
        """A version is gone."""
        if taken := self._taken.pop(adapter_id, None):
            self._bytes[taken[0]] -= taken[1]
            self._versions[taken[0]] -= 1

    def _check_bytes(self, key: Key, more: int) -> None:
        own = self._bytes[key.name]
        if key.max_adapter_bytes is not None and own + more > key.max_adapter_bytes:
            limit = f"{key.max_adapter_bytes:,} bytes on the server's disks, its max_adapter_bytes"
            taken = f"they take {own:,}, and this one {more:,}"
            raise _full(f"The adapters of key '{key.name}' may take {limit}: {taken}. Unload one first.")


def _full(message: str) -> RequestError:
    return RequestError(Fault(FaultCode.KEY_FULL, message))
