"""The contents of a folder in the cache: what it was made from, and each file's size and digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

USED = ".used"


@dataclass(frozen=True, slots=True)
class Contents:
    """As they were when the folder was made."""

    address: str = ""
    digest: str = ""
    owner: str = ""  # the key that it was brought for; empty: the server itself
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.files.values())

    def are_in(self, folder: Path, deeply: bool) -> bool:
        """Whether a folder still has them. `deeply` reads every byte; else sizes are compared."""
        with suppress(OSError):
            return bool(self.files) and all(
                (folder / name).stat().st_size == size and not (deeply and sha256_of(folder / name) != digest)
                for name, (size, digest) in self.files.items()
            )
        return False


def contents_in(folder: Path) -> Contents:
    """Without files if the folder is gone or was damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        told = json.loads((folder / USED).read_text("utf-8"))
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in told["files"].items()}
        return Contents(str(told["address"]), str(told["digest"]), str(told.get("owner", "")), files)
    return Contents()


def note_contents(folder: Path, contents: Contents) -> None:
    """Write down what lies in a folder. What a loss of power takes away again is found by its digest."""
    files = {path.name: (path.stat().st_size, sha256_of(path)) for path in folder.iterdir() if path.name != USED}
    (folder / USED).write_text(json.dumps(asdict(replace(contents, files=files))), "utf-8")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
