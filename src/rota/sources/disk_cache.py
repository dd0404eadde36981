"""The disk cache keeps adapters of sources in folders, up to a size; who asks for one gets a folder to read from.

    KEY.lock          held by the one that downloads
    KEY.part/         what has come so far
    KEY/              complete, never written again; its `.used` is held by those who read, and touched by each

A key is an address with its pin, so one folder has one content for ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rota.sources.address import Address
from rota.sources.download import Download

USED = ".used"


class DiskCache:
    """For any thread and process: locks of files keep them apart."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self.most_bytes = most_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def reading(self, address: Address) -> Iterator[Path | None]:
        """The folder of a pinned address, which stays while the block runs; None if it is not here."""
        folder = self._folder / _key(address)
        with _held(folder / USED, fcntl.LOCK_SH) as is_held:
            if is_held:
                os.utime(folder / USED)
            yield folder if is_held else None

    def newest(self, address: Address) -> Address | None:
        """The address with the pin under which it was kept last."""
        found = [folder for folder in self._complete() if _told(folder).get("address") == str(address)]
        return None if not found else address.pinned(str(_told(max(found, key=_used_at))["pin"]))

    def keep(self, address: Address, download: Download) -> None:
        """Bring a pinned address here, unless another does or has done so: then wait for that. Raises SourceError."""
        key = _key(address)
        with _alone(self._folder / f"{key}.lock"):
            folder, part = self._folder / key, self._folder / f"{key}.part"
            if (folder / USED).exists():
                return
            self._make_room(download.size)
            part.mkdir(exist_ok=True)  # or what a process that died has left, and then the rest is fetched
            try:
                download.into(part)
            except Exception:
                shutil.rmtree(part, ignore_errors=True)
                raise
            about = {"address": str(address.pinned("")), "pin": address.pin, "bytes": download.size}
            (part / USED).write_text(json.dumps(about), "utf-8")
            os.rename(part, folder)

    def size(self) -> int:
        """The bytes of all complete folders."""
        return sum(int(_told(folder).get("bytes", 0)) for folder in self._complete())

    def _make_room(self, size: int) -> None:
        """Remove what was read longest ago. What is being read stays, though the cache is too large for a while."""
        over = self.size() + size - self.most_bytes
        for folder in sorted(self._complete(), key=_used_at):
            if over <= 0:
                return
            with _held(folder / USED, fcntl.LOCK_EX) as is_held:
                if is_held:
                    over -= int(_told(folder).get("bytes", 0))
                    (folder / USED).unlink()  # first: without it a folder counts as gone
                    shutil.rmtree(folder, ignore_errors=True)

    def _complete(self) -> list[Path]:
        return [used.parent for used in self._folder.glob(f"*/{USED}") if used.parent.suffix != ".part"]


def _key(address: Address) -> str:
    return hashlib.sha256(str(address).encode()).hexdigest()[:32]


def _told(folder: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / USED).read_text("utf-8")))
    return {}


def _used_at(folder: Path) -> float:
    with suppress(OSError):
        return (folder / USED).stat().st_mtime
    return 0.0


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock that others wait for."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _held(path: Path, kind: int) -> Iterator[bool]:
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
