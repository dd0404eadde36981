"""Uploads are adapters that came in bodies: engines on other machines get their files in pieces, ahead of their names.

The server's spool lies on the server's disk. An engine that has no such disk keeps the files in a spool of its own, as
long as it has the adapter; an engine that is started again gets them once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from rota.core.errors import DiskError
from rota.core.events import AdapterRefused, AdapterRemoved, Event
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, Message
from rota.runtime.spool import ON_ANOTHER_DISK, PREFIX, Spool, discard

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
