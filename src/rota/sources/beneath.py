"""What lies beneath a folder is opened step by step from its descriptor, and no step of the way may leave that folder.

What a path led to when it was checked says nothing of what is opened by it later: a file can be exchanged with a link
in between. So each step is opened in the folder that was opened before it, and what is open can be checked and read
without its name. No link is followed by the system: it is read, and its own steps are walked like the others.

`openat2` with RESOLVE_BENEATH does most of this in one call. But it refuses absolute links that lead back into the
folder, it fails while something is renamed there, and not every container has it: it would be a second way beside this
one, which takes ten microseconds a step.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# As many links as Linux follows, and as long a path as it takes: a longer walk would only cost time.
MOST_LINKS, LONGEST_PATH = 40, 4096
# Folders that are open during a walk. No adapter lies so deep, and descriptors are few.
MOST_FOLDERS = 64

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # not to wait for the writer of a pipe
# What is said of a link that is opened as a folder, or as a file.
_IS_LINK = (errno.ENOTDIR, errno.ELOOP)


class LeavesError(Exception):
    """A step of a path leaves its root, or the path is too long to be walked."""


class Beneath:
    """An open place beneath a root. It is the root at first; who made it closes it."""

    def __init__(self, root: Path, looks_outside: bool = False) -> None:
        """The root must have no link in it: raises OSError for one that has, or is not there.

        An absolute link must begin with the root. With `looks_outside` it may lead there by links outside, too.
        """
        self._root, self._looks_outside = root, looks_outside
        self._way = [("", _opened_folder(root))]
        self._kept = [self._way[0][1]]  # descriptors to close

    @property
    def path(self) -> Path:
        return self._root.joinpath(*(name for name, _ in self._way))

    def close(self) -> None:
        while self._kept:
            os.close(self._kept.pop())

    def enter(self, folder: str | Path) -> None:
        """Go on to a folder. Raises LeavesError if a step leaves the root, OSError if one cannot be made.

        A path that leaves the root and comes back is refused too. Else a client could learn what lies beside the root:
        `../other/../mine` leads to another place if `other` is a link. Nothing outside the root is looked at.
        """
        self._way = self._walk(str(folder), self._kept, _FOLDER)

    def open(self, file: str) -> tuple[int, Path]:
        """A descriptor to read a file by, which the caller closes, and where the file lies. Raises as `enter`."""
        kept = list[int]()
        try:
            way = self._walk(file, kept, _FILE)
            if not stat.S_ISREG(os.fstat(way[-1][1]).st_mode):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
            return kept.pop(), self._root.joinpath(*(name for name, _ in way))
        finally:
            for descriptor in kept:
                os.close(descriptor)

    def _walk(self, path: str, kept: list[int], last: int) -> list[tuple[str, int]]:
        """The names and descriptors on the way to a path; `last` says how its last step is opened."""
        way, links, most = list(self._way), 0, len(kept) + MOST_FOLDERS
        steps = self._steps(path, way)
        while steps:
            step = steps.pop()
            if step == "..":
                if len(way) == 1:
                    raise LeavesError
                way.pop()
                continue
            try:
                way.append((step, os.open(step, _FOLDER if steps else last, dir_fd=way[-1][1])))
            except OSError as error:
                links += 1
                if links > MOST_LINKS:
                    raise LeavesError from None
                steps += self._steps(_link_at(step, way[-1][1], error), way)
                continue
            kept.append(way[-1][1])
            if len(kept) > most:
                raise LeavesError
        return way

    def _steps(self, path: str, way: list[tuple[str, int]]) -> list[str]:
        """The names on a way, the last one first. An absolute path starts at the root again."""
        if len(path) >= LONGEST_PATH:
            raise LeavesError
        if os.path.isabs(path):
            start = self._root.parts[1:]
            parts = _parts(path)
            if self._looks_outside and parts[: len(start)] != [*start]:
                parts = _parts(os.path.realpath(path))
            if parts[: len(start)] != [*start]:
                raise LeavesError
            del way[1:]
            return parts[len(start) :][::-1]
        return _parts(path)[::-1]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _link_at(name: str, folder: int, error: OSError) -> str:
    """What a link says. Raises the error that the opening of the name had if it is none."""
    if error.errno not in _IS_LINK:
        raise error
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        raise error from None


def _opened_folder(path: Path) -> int:
    """By its real path, and without a link anywhere on it."""
    place = os.open("/", _FOLDER)
    for part in path.parts[1:]:
        before = place
        try:
            place = os.open(part, _FOLDER, dir_fd=before)
        finally:
            os.close(before)
    return place
