"""A small disk holds the server's log, its temporary files and its adapters' folders, and can be filled."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_CLONE_NEWNS = 0x00020000  # from <linux/sched.h>
_MS_PRIVATE, _MS_REC = 1 << 18, 1 << 14  # from <linux/mount.h>
_MNT_DETACH = 2
_SIZE = "size=64m,nr_inodes=2048,mode=700"
_FILLER = "filler"


class Disk:
    """A file system in memory if this user may mount one, else a folder, with a limit on the size of files."""

    def __init__(self, folder: Path) -> None:
        """Moves this process into a mount namespace of its own, so that the mount ends with the process."""
        folder.mkdir()
        self.folder = folder
        self.is_mounted = _mount_in_memory(folder)

    def __str__(self) -> str:
        return f"tmpfs ({_SIZE})" if self.is_mounted else "a folder with RLIMIT_FSIZE"

    def close(self) -> None:
        """Unmount it, so that its folder can be removed."""
        if self.is_mounted:
            ctypes.CDLL(None).umount2(os.fsencode(self.folder), _MNT_DETACH)

    def fill(self, pids: Iterable[int], with_files: bool) -> None:
        """Leave no byte free; with `with_files`, no new file and no new folder fits either."""
        if self.is_mounted:
            self._write_filler()
            if with_files:
                self._make_files()
        else:
            _limit_files(pids, 0)

    def release(self, pids: Iterable[int]) -> None:
        for filler in self.folder.glob(f"{_FILLER}*"):
            filler.unlink()
        if not self.is_mounted:
            _limit_files(pids, resource.RLIM_INFINITY)

    def _write_filler(self) -> None:
        with suppress(OSError), (self.folder / _FILLER).open("wb", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while filler.write(bytes(size)):
                        pass

    def _make_files(self) -> None:
        number = 0
        try:
            while True:
                (self.folder / f"{_FILLER}-{number}").touch()
                number += 1
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _mount_in_memory(folder: Path) -> bool:
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, _SIZE.encode())


def _limit_files(pids: Iterable[int], size: int) -> None:
    """Python ignores the signal that comes with a file that grows too large, so a write fails with an error."""
    for pid in pids:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))
