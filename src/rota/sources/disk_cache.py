"""The disk cache keeps adapters of sources in folders, up to a size; who asks for one gets a folder to read from.

    KEY.lock          held by the one that downloads
    KEY.part/         what has come so far
    KEY/              complete, never written again; its `.used` is held by those who read, and touched by each

A key is an address with its digest, so one folder has one content for ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rota.core.errors import DiskError, FaultCode
from rota.sources.address import Address
from rota.sources.download import USED, Contents, Download, contents_in, note_contents
from rota.sources.source import SourceError

# ── file locks ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Locks of files keep threads and processes apart, and end with the process that holds them.

PAUSE_S = 0.01


@contextmanager
def alone(lock: Path, timeout_s: float) -> Iterator[bool]:
    """Hold a lock that others wait for; False if it did not become free in time. Its file is gone afterwards."""
    ends_at = time.monotonic() + timeout_s
    while (file := _taken(lock)) is None:
        if time.monotonic() > ends_at:
            yield False
            return
        time.sleep(PAUSE_S)
    with file:
        try:
            yield True
        finally:
            lock.unlink(missing_ok=True)  # while it is held: who waits for this file finds that it is gone


@contextmanager
def held(path: Path, kind: int) -> Iterator[bool]:
    """Hold a file's lock without waiting; False if the file is not there, or held in another way."""
    try:
        file = path.open("r+")
    except FileNotFoundError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield path.exists()  # else it was removed between the two


def _taken(lock: Path) -> TextIO | None:
    file = lock.open("w")
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), lock.stat()):  # else another has held and removed it
            return file
    file.close()
    return None


PART = ".part"
ON_ANOTHER_DISK = "start the server with --adapter-cache-dir on another"


class DiskCache:
    """For any thread and process: locks of files keep them apart."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder.resolve()  # as errors of its files name it
        self.most_bytes = most_bytes
        self._seen: set[str] = set()  # keys whose content was compared in this process

    @contextmanager
    def reading(self, address: Address) -> Iterator[Path | None]:
        """The folder of an exact address, which stays while the block runs; None if it is not here, or damaged."""
        folder = self._folder / _key(address)
        with held(folder / USED, fcntl.LOCK_SH) as is_held:
            is_whole = is_held and contents_in(folder).are_in(folder, deeply=folder.name not in self._seen)
            if is_whole:
                self._seen.add(folder.name)
                os.utime(folder / USED)
            yield folder if is_whole else None

    def newest(self, address: Address) -> Address | None:
        """The address with the digest under which it was kept last."""
        found = [folder for folder in self._complete() if contents_in(folder).address == str(address)]
        return None if not found else address.with_digest(contents_in(max(found, key=_used_at)).digest)

    def keep(self, address: Address, download: Download, owner: str = "") -> None:
        """Bring an exact address here for a key, unless another does or has done so: then wait for that.

        Raises SourceError, or DiskError for a disk that is full or fails.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with alone(self._folder / f"{_key(address)}.lock", download.timeout_s) as is_alone:
                if not is_alone:
                    raise SourceError(f"Another process has not brought {address.plain} here in time.")
                with self.reading(address) as there:
                    if there is not None:
                        return
                self._bring(address, download, owner)
        except OSError as error:
            raise DiskError.at(str(self._folder), error, ON_ANOTHER_DISK) from error

    def drop(self, address: Address) -> None:
        """Remove the folder of an exact address, unless another reads it."""
        self._remove(self._folder / _key(address))

    def size_of(self, address: Address) -> int:
        """The bytes of an exact address; 0 if it is not here."""
        return contents_in(self._folder / _key(address)).size

    def _bring(self, address: Address, download: Download, owner: str) -> None:
        folder = self._folder / _key(address)
        part = folder.with_suffix(PART)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        self._sweep(part)
        self._free(download.size, owner, None)
        part.mkdir(exist_ok=True)  # or what a process that died has left, and then the rest is fetched
        try:
            download.into(part)
            note_contents(part, Contents(str(address.plain), address.digest, owner))
        except BaseException:  # whatever it is, nothing is left behind
            shutil.rmtree(part, ignore_errors=True)
            raise
        os.rename(part, folder)
        self._seen.add(folder.name)

    def make_room(self, newest: Address, owner: str = "") -> None:
        """Remove what was read longest ago, of the key that takes most; the newest and what is being read stay.

        For an adapter that was accepted, and not before: what a server refuses must not drive out what it serves. So
        the cache is too large while new adapters are fetched and tried. A tenth of its size stays free on its disk.
        """
        folder = self._folder / _key(newest)
        with suppress(DiskError):  # it has come meanwhile, and stays
            self._free(contents_in(folder).size, owner, folder)

    def _sweep(self, own: Path) -> None:
        """Remove what processes that died have left of other downloads."""
        for part in self._folder.glob(f"*{PART}"):
            if part != own and not part.with_suffix(".lock").exists():
                shutil.rmtree(part, ignore_errors=True)

    def _free(self, size: int, owner: str, newest: Path | None) -> None:
        """Make room for the newest, of so many bytes. Without it, only see whether there will be room.

        Raises DiskError for a key that would take more than each of those whose adapters had to leave for it.
        """
        folders = defaultdict[str, list[Path]](list)  # by key, what was read longest ago first
        sizes = Counter({owner: size})
        for folder in sorted(self._complete(), key=_used_at):
            if folder != newest:
                contents = contents_in(folder)
                folders[contents.owner].append(folder)
                sizes[contents.owner] += contents.size
        to_come = size if newest is None else 0
        lacking = to_come + self.most_bytes // 10 - shutil.disk_usage(self._folder).free
        over = max(sizes.total() - self.most_bytes, lacking)
        while over > 0 and (holders := [one for one, left in folders.items() if left]):
            largest = max(holders, key=sizes.__getitem__)
            if owner and sizes[largest] < sizes[owner]:
                if sizes[owner] > size:
                    return  # all that the key has besides is being read
                message = f"Key '{owner}' would take more of the cache on disk than others whose adapters had to leave."
                raise DiskError(message, FaultCode.DISK_FULL)
            leaver = folders[largest].pop(0)
            freed = contents_in(leaver).size if newest is None else self._remove(leaver)
            over, sizes[largest] = over - freed, sizes[largest] - freed

    def _remove(self, folder: Path) -> int:
        """The bytes that are free now: none if the folder is being read."""
        with held(folder / USED, fcntl.LOCK_EX) as is_held:
            if not is_held:
                return 0
            size = contents_in(folder).size
            (folder / USED).unlink()  # first: without it a folder counts as gone
            shutil.rmtree(folder, ignore_errors=True)
            return size

    def _complete(self) -> list[Path]:
        return [used.parent for used in self._folder.glob(f"*/{USED}") if used.parent.suffix != PART]


def _key(address: Address) -> str:
    return hashlib.sha256(str(address).encode()).hexdigest()[:32]


def _used_at(folder: Path) -> float:
    with suppress(OSError):
        return (folder / USED).stat().st_mtime
    return 0.0
