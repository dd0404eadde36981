"""A spool is a process's own folder for weights that came in bodies; engines elsewhere get its files in pieces."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from rota.core.errors import DiskError
from rota.core.events import AdapterRefused, AdapterRemoved, Event
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, Message

# ── spool ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A spool is a process's own folder for weights that came in bodies, and keeps each as long as its version is there.
#
# An engine reads a version again when its host memory was needed for others, and after a restart: so the files stay
# until the version is gone. A process that was killed leaves its folder behind, and the next one on the machine
# removes it.

PREFIX = "rota-spool-"
# What helps where the folder for temporary files is full.
ON_ANOTHER_DISK = "start the server with TMPDIR on another"
# Begins the name of each version's folder in it, so that sentences for clients can leave it out.
FOLDER = "rota-body-"


class Spool:
    """Made on disk with the first body, in the folder for temporary files. Only the process's user may look into it."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._root: Path | None = None
        self._lock: int | None = None
        self._kept: dict[AdapterId, Path] = {}
        # One that stays: to start a thread is to wait for it.
        self._closer = ThreadPoolExecutor(1, "rota-spool")

    def new_folder(self) -> Path:
        """An empty folder for one version. Blocks on the disk."""
        return Path(tempfile.mkdtemp(prefix=FOLDER, dir=self.root))

    @property
    def parent(self) -> Path:
        """The folder that it lies in, which an operator knows."""
        return (self._parent or Path(tempfile.gettempdir())).resolve()

    def free_bytes(self) -> int:
        """What is left on its disk."""
        return shutil.disk_usage(self.parent).free

    @property
    def root(self) -> Path:
        if self._root is None:
            _sweep(self.parent)
            self._root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.parent))
            self._lock = _locked(self._root)
        return self._root

    def is_root(self, folder: str) -> bool:
        return self._root is not None and folder == str(self._root)

    def keep(self, adapter_id: AdapterId, folder: Path) -> None:
        """The folder belongs to this version from now on."""
        self._kept[adapter_id] = folder

    def has(self, adapter_id: AdapterId) -> bool:
        """Whether a version came in a body."""
        return adapter_id in self._kept

    def drop(self, adapter_id: AdapterId) -> None:
        """A version is gone, and its folder with it. Does not wait for the disk."""
        if folder := self._kept.pop(adapter_id, None):
            self.discard(folder)

    def discard(self, folder: Path) -> None:
        """Remove a folder without waiting for the disk: an event loop calls this.

        Files that are open lose their names at once, and give their bytes back when they are closed. That takes some
        milliseconds for the 84 MB of an adapter, so a thread closes them.
        """
        files = ExitStack()
        with suppress(OSError):
            for path in folder.iterdir():
                files.enter_context(path.open("rb"))
        discard(folder)
        self._closer.submit(files.close)

    def close(self) -> None:
        if self._root is not None:
            discard(self._root)
        if self._lock is not None:
            os.close(self._lock)
        self._root = self._lock = None
        self._kept = {}


def discard(folder: Path) -> None:
    """Remove a folder with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> int | None:
    """Hold a folder for as long as this process lives; None if another process holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep(parent: Path) -> None:
    """Remove what processes of this user left behind that were killed."""
    for left in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            is_own = left.lstat().st_uid == os.getuid() and left.is_dir() and not left.is_symlink()
            if is_own and (handle := _locked(left)) is not None:
                discard(left)
                os.close(handle)


# ── uploads ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Uploads are adapters that came in bodies: engines on other machines get their files in pieces, ahead of their names.
#
# The server's spool lies on the server's disk. An engine that has no such disk keeps the files in a spool of its own,
# as long as it has the adapter; an engine that is started again gets them once more.

# Below what a line between machines takes in one message.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class UploadPiece:
    """The next bytes of a file of an adapter that is about to be added."""

    adapter_id: AdapterId
    file: str
    content: bytes


def pieces_before(message: object) -> Iterator[UploadPiece]:
    """What an engine elsewhere must have before it gets a message: nothing, unless that adds an upload.

    Blocks on the disk. If the files are gone, the engine finds none and refuses the adapter.
    """
    if not isinstance(message, AddAdapter) or not adds_upload(message):
        return
    with suppress(OSError):
        for path in sorted(Path(message.adapter.path).iterdir()):
            with path.open("rb") as file:
                while content := file.read(PIECE_BYTES):
                    yield UploadPiece(message.adapter.adapter_id, path.name, content)


def adds_upload(message: object) -> bool:
    """Whether a message adds an adapter that lies in the server's spool."""
    root = message.adapter.root if isinstance(message, AddAdapter) else None
    return root is not None and PurePath(root).name.startswith(PREFIX)


class Arrivals:
    """The engine's side, for the thread of its loop. Without uploads it does nothing."""

    def __init__(self, parent: Path | None = None) -> None:
        self._spool = Spool(parent)
        self._arriving: dict[AdapterId, Path] = {}
        self._failed: dict[AdapterId, DiskError] = {}

    def take(self, record: Message | UploadPiece) -> Message | None:
        """A message, with the place where its upload lies on this machine; None for a piece of one."""
        if isinstance(record, UploadPiece):
            self._write(record)
            return None
        if isinstance(record, AddAdapter):
            return self._placed(record)
        return record

    def observe(self, events: Iterable[Event]) -> None:
        """The files of adapters that are gone go too."""
        for event in events:
            if isinstance(event, AdapterRemoved | AdapterRefused):
                self._spool.drop(event.adapter_id)

    def close(self) -> None:
        self._spool.close()

    def _write(self, piece: UploadPiece) -> None:
        adapter_id = piece.adapter_id
        if adapter_id in self._failed:
            return
        try:
            if adapter_id not in self._arriving:
                self._arriving[adapter_id] = self._spool.new_folder()
            with (self._arriving[adapter_id] / PurePath(piece.file).name).open("ab") as file:
                file.write(piece.content)
        except OSError as error:
            place = f"{self._spool.parent} on the engine's machine"
            self._failed[adapter_id] = DiskError.at(place, error, ON_ANOTHER_DISK)
            if folder := self._arriving.pop(adapter_id, None):
                discard(folder)

    def _placed(self, message: AddAdapter) -> AddAdapter:
        adapter_id = message.adapter.adapter_id
        if failure := self._failed.pop(adapter_id, None):
            return replace(message, refusal=str(failure), refusal_code=failure.code)
        folder = self._arriving.pop(adapter_id, None)
        if folder is None:
            return message
        with suppress(OSError):  # named as on the server, which takes that name out of reasons
            folder = folder.rename(folder.with_name(PurePath(message.adapter.path).name))
        self._spool.keep(adapter_id, folder)
        return replace(message, adapter=replace(message.adapter, path=str(folder), root=str(self._spool.root)))
