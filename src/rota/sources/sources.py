"""Sources turns the address of an adapter into a folder on this machine's disk; the locator finds the address."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rota.core.config import LoraConfig
from rota.core.errors import AdapterError, BusyError
from rota.core.lora_paths import LoraPath
from rota.sources.address import HUB, Address, address_of, has_scheme, hide_root, is_repository
from rota.sources.disk_cache import DiskCache
from rota.sources.download import Download
from rota.sources.object_store import ObjectStore
from rota.sources.source import ChangedError, Source, SourceError, SourceFile, UnreachableError, digest_of, wanted

# ── outline ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# An outline of an adapter is a folder with its config and the headers of its weights, read without the weights.
#
# The files are as long as the source says, so what checks a header against a size needs to know no outlines.

# Holds the header of a rank-16 adapter of an 8B model, which has 448 tensors, in one read.
FIRST_BYTES = 128 << 10
# A header beyond this is no adapter's: it would have a hundred thousand tensors.
MOST_BYTES = 16 << 20


@contextmanager
def outlined(source: Source, place: str, files: Sequence[SourceFile]) -> Iterator[Path]:
    """A folder that is gone after the block. Raises SourceError."""
    with tempfile.TemporaryDirectory(prefix="rota-outline-") as name:
        folder = Path(name).resolve()
        for file in files:
            with (folder / file.name).open("wb") as out:
                out.write(_start_of(source, place, file))
                out.truncate(file.size)
        yield folder


def _start_of(source: Source, place: str, file: SourceFile) -> bytes:
    if not file.name.endswith(".safetensors"):
        return _read(source, place, file, 0, file.size)
    first = _read(source, place, file, 0, min(FIRST_BYTES, file.size))
    end = 8 + int.from_bytes(first[:8], "little")
    if end <= len(first) or end > min(file.size, MOST_BYTES):  # in the second case what follows would be no header
        return first
    return first + _read(source, place, file, len(first), end)


def _read(source: Source, place: str, file: SourceFile, start: int, end: int) -> bytes:
    if start == end:
        return b""
    content = b"".join(source.read(place, file, start, end))
    if len(content) != end - start:
        raise ChangedError(f"{place}/{file.name} is not as long as its source says: {file.size:,} bytes.")
    return content


def source_for(scheme: str) -> Source:
    if scheme != HUB:
        return ObjectStore(scheme)
    from rota.sources.hub import Hub  # imported here: it takes a while, and few need it

    return Hub()


def sources_for(lora: LoraConfig) -> Sources:
    """With a cache in the folder that the config names, or where caches lie on this machine."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(lora.adapter_cache_dir or Path(home) / "rota" / "adapters")
    return Sources(DiskCache(folder, int(lora.adapter_cache_gb * 1e9)))


class Sources:
    """For any thread; blocks on the network, within the time-outs of sources."""

    def __init__(self, cache: DiskCache, open_source: Callable[[str], Source] = source_for) -> None:
        self._cache = cache
        self._open = open_source
        # Of adapters that were looked at and are downloaded next: a listing is a call to the source.
        self._listings: dict[Address, list[SourceFile]] = {}

    def exact(self, address: Address) -> Address:
        """The address of what lies there now. Raises SourceError."""
        return address if address.digest else address.with_digest(digest_of(self._listed(address)))

    def located(self, address: Address) -> tuple[Address, int]:
        """As `exact`, and how many bytes lie there."""
        if size := address.digest and self._cache.size_of(address):
            return address, size
        files = self._exact_files(address) if address.digest else self._listed(address)
        return address.with_digest(digest_of(files)), sum(one.size for one in files)

    def exact_or_kept(self, address: Address) -> Address:
        """As `exact`; where the source does not answer, the address of what was brought here last."""
        try:
            return self.exact(address)
        except UnreachableError:
            if (kept := self._cache.newest(address)) is None:
                raise
            return kept

    @contextmanager
    def folder_of(self, address: Address, owner: str | None = None) -> Iterator[Path]:
        """A folder with the adapter, which stays while the block runs. Raises AdapterError, which names the address.

        `owner` is the key that it is brought for: what a key brings takes the place of its own first.
        What a block refuses with an AdapterError is no adapter for this server: it does not stay on the disk.
        """
        address = self.exact(address)
        try:
            with self._here(address, owner or "") as folder:
                yield folder
        except BusyError:
            raise
        except AdapterError:
            self._cache.drop(address)
            raise

    @contextmanager
    def outline_of(self, address: Address) -> Iterator[Path]:
        """A folder with the adapter's config and headers; weights that are not on the disk read as zeros."""
        address = self.exact(address)
        with self._kept(address) as folder:
            if folder is not None:
                yield folder
                return
        source, files = self._open(address.scheme), self._exact_files(address)
        with outlined(source, address.place, files) as folder, _named(folder, address):
            yield folder
        self._listings[address] = files

    @contextmanager
    def _here(self, address: Address, owner: str) -> Iterator[Path]:
        """The folder of an exact address, from the cache or from the source."""
        with self._kept(address) as folder:
            if folder is not None:
                yield folder
                return
        files = self._listings.pop(address, None) or self._exact_files(address)  # reads find what has changed since
        download = Download(source=self._open(address.scheme), place=address.place, files=files)
        self._cache.keep(address, download, owner)
        with self._kept(address) as folder:
            if folder is None:
                raise SourceError(f"Another process has removed {address.plain} from the cache on disk; load it again.")
            yield folder
        self._cache.make_room(address, owner)  # the block has not refused it

    @contextmanager
    def _kept(self, address: Address) -> Iterator[Path | None]:
        """The folder of an exact address in the cache; None if it is not there."""
        with self._cache.reading(address) as folder:
            if folder is None:
                yield None
                return
            with _named(folder, address):
                yield folder

    def _exact_files(self, address: Address) -> list[SourceFile]:
        files = self._listed(address)
        if digest_of(files) != address.digest:
            where = address.plain
            raise ChangedError(f"{where} holds something else than when it was loaded; load it again as a new version.")
        return files

    def _listed(self, address: Address) -> list[SourceFile]:
        found = self._open(address.scheme).files(address.place)
        return wanted(found, str(address.plain), self._cache.most_bytes)


@contextmanager
def _named(folder: Path, address: Address) -> Iterator[None]:
    """What is wrong with a folder of the cache is told of the address: clients know no other place."""
    try:
        yield
    except AdapterError as error:
        raise error.reworded(str(error).replace(str(folder), str(address.plain))) from error


# ── locator ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The locator turns the path of an adapter that is asked for into the exact address of what lies there now.

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
        except AdapterError as error:
            raise error.reworded(hide_root(_told(asked, error), asked.root)) from None

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


def _told(asked: LoraPath, error: AdapterError) -> str:
    """A name that could be a folder's is looked for in two places, and the client may mean either."""
    if isinstance(error, SourceError) and asked.root is None and not has_scheme(asked.path):
        return f"There is no adapter folder at {asked.path}, and as a name on the Hub: {error}"
    return str(error)
