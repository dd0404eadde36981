"""Sources turns the address of an adapter into a folder on this machine's disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rota.sources.address import HUB, Address
from rota.sources.disk_cache import DiskCache
from rota.sources.download import Download
from rota.sources.hub import Hub
from rota.sources.object_store import ObjectStore
from rota.sources.source import ChangedError, Source, SourceFile
from rota.sources.wanted import pin_of, wanted


def source_for(scheme: str) -> Source:
    return Hub() if scheme == HUB else ObjectStore(scheme)


class Sources:
    """For any thread; blocks on the network, within the time-outs of sources."""

    def __init__(self, cache: DiskCache, open_source: Callable[[str], Source] = source_for) -> None:
        self._cache = cache
        self._open = open_source

    def pin(self, address: Address) -> Address:
        """The address of what lies there now. Raises SourceError."""
        return address if address.pin else address.pinned(pin_of(self._listed(address)))

    @contextmanager
    def folder_of(self, address: Address) -> Iterator[Path]:
        """A folder with the adapter, which stays while the block runs. Raises SourceError.

        An address without a pin means what the cache has; else what lies there now.
        """
        if not address.pin:
            address = self._cache.newest(address) or self.pin(address)
        with self._cache.reading(address) as folder:
            if folder is not None:
                yield folder
                return
        self._fetch(address)
        with self._cache.reading(address) as folder:
            if folder is None:
                raise ChangedError(f"The cache on disk has no room for {address} beside what is being read.")
            yield folder

    def _fetch(self, address: Address) -> None:
        files = self._listed(address)
        if pin_of(files) != address.pin:
            where = address.pinned("")
            raise ChangedError(f"{where} holds something else than when it was loaded; load it again as a new version.")
        source = self._open(address.scheme)
        self._cache.keep(address, Download(source=source, place=address.place, files=files))

    def _listed(self, address: Address) -> list[SourceFile]:
        found = self._open(address.scheme).files(address.place)
        return wanted(found, str(address.pinned("")), self._cache.most_bytes)
