"""The locator turns the path of an adapter that is asked for into the exact address of what lies there now."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rota.core.errors import AdapterError
from rota.core.lora_paths import LoraPath
from rota.sources.address import Address, address_of, has_scheme, hide_root, is_repository
from rota.sources.source import SourceError
from rota.sources.sources import Sources

# A listing waits for the network more than it computes.
THREADS = 16


class Locator:
    """For any thread; blocks on the network for addresses, and not for folders."""

    def __init__(self, adapter_root: str | None, sources: Sources) -> None:
        self._root, self._sources = adapter_root, sources

    def may_be_far(self, asked: LoraPath) -> bool:
        """Whether the adapter may lie in a source, by the look of its path and root. Does not block."""
        if (root := asked.root or self._root) is not None:
            return has_scheme(root) or (asked.root is None and has_scheme(asked.path))
        return has_scheme(asked.path) or is_repository(asked.path)

    def locate(self, asked: LoraPath) -> LoraPath:
        """Raises AdapterError if there is no adapter, or the source does not answer."""
        try:
            if (address := self._address(asked)) is None:
                return asked
            exact, size = self._sources.located(address)
            return replace(asked, path=str(exact), size_bytes=size)
        except SourceError as error:
            raise error.reworded(hide_root(_told(asked, error), asked.root)) from None
        except AdapterError as error:
            raise error.reworded(hide_root(str(error), asked.root)) from None

    def locate_first(self, asked: Sequence[LoraPath]) -> list[LoraPath]:
        """Those that a server starts with. A source that does not answer is done without, where the disk can."""
        far = [one for one in asked if not one.is_builtin and self.may_be_far(one)]
        if not far:
            return list(asked)
        with ThreadPoolExecutor(THREADS, "adapter-listing") as pool:
            located = dict(zip(map(id, far), pool.map(self._locate_first, far), strict=True))
        return [located.get(id(one), one) for one in asked]

    def _locate_first(self, asked: LoraPath) -> LoraPath:
        address = self._address(asked)
        try:
            return asked if address is None else replace(asked, path=str(self._sources.exact_or_kept(address)))
        except SourceError as error:
            raise AdapterError(_told(asked, error)) from None

    def _address(self, asked: LoraPath) -> Address | None:
        return None if asked.is_builtin else address_of(asked.path, self._root, asked.root)


def _told(asked: LoraPath, error: SourceError) -> str:
    """A name that could be a folder's is looked for in two places, and the client may mean either."""
    if asked.root is None and not has_scheme(asked.path):
        return f"There is no adapter folder at {asked.path}, and as a name on the Hub: {error}"
    return str(error)
