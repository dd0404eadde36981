"""An adapter's folder is brought to this machine before it is read, if the adapter lies in a source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rota.core.adapter import Adapter
from rota.core.lora_paths import LoraPath
from rota.sources.address import address_of
from rota.sources.sources import Sources


class FolderPlace(NamedTuple):
    """A folder, and the roots that it must not leave; as `AdapterFolder` takes them."""

    path: str
    root: str | None = None
    key_root: str | None = None


class Brought:
    """For any thread. Without sources, every path is a folder's."""

    def __init__(self, adapter_root: str | None = None, sources: Sources | None = None) -> None:
        self._root, self._sources = adapter_root, sources

    @contextmanager
    def place_of(self, adapter: Adapter | LoraPath, is_outline: bool = False) -> Iterator[FolderPlace]:
        """The folder to read the adapter from, which stays while the block runs. Raises AdapterError; blocks.

        For an outline weights of a source need not be there: only config and headers are sure to be right.
        """
        root = None if adapter.is_builtin else self._root
        address = None if adapter.is_builtin else address_of(adapter.path, root, adapter.root)
        if address is None or self._sources is None:
            yield FolderPlace(adapter.path, root, adapter.root)
            return
        sources = self._sources
        with sources.outline_of(address) if is_outline else sources.folder_of(address, adapter.owner) as folder:
            yield FolderPlace(str(folder))
