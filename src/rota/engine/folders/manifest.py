"""A manifest lists the files of a folder, so that a damaged or unfinished folder is found before it is used."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rota.sources.download import sha256_of

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """List every file of a folder, with its digest and its stamp; the manifest is written last."""
    listed = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file)  # after a loss of power a file may have its size and times, but not its bytes
        listed[path.name] = {"stamp": _stamp(path), "sha256": sha256_of(path)}
    _write(folder, listed)


def damage_of(folder: Path) -> str:
    """How a folder differs from its manifest, in a few words; empty if it does not differ.

    A file with the stamp that the manifest has is not read: the built-in model has 370 MB, which take 0.3 to 1 s.
    All others are read whole. If they are as they were written, the manifest gets their new stamps.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text("utf-8"))
        stamps = {name: (traits["stamp"], traits["sha256"]) for name, traits in listed.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return f"{MANIFEST} is missing or cannot be read"
    if not stamps:
        return f"{MANIFEST} lists no files"
    has_changed = False
    for name, (stamp, digest) in stamps.items():
        try:
            if (found := _stamp(folder / name)) == stamp:
                continue
            if sha256_of(folder / name) != digest:
                return f"{name} is not as it was written"
        except OSError:
            return f"{name} is missing or cannot be read"
        listed[name]["stamp"], has_changed = found, True
    if has_changed:
        with suppress(OSError):  # the folder of another user; each start reads the files then
            _write(folder, listed)
    return ""


def _stamp(path: Path) -> list[int]:
    """Another one as soon as a file is written to, or another file stands in its place.

    That is enough, because no program can set back the time of the last change (ctime), and a user who may write
    to the files may write a manifest too. A disk that changes bytes by itself is not found.
    """
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _write(folder: Path, listed: dict[str, Any]) -> None:
    """Whole or not at all: others may read it."""
    with tempfile.NamedTemporaryFile("w", dir=folder.parent, prefix=f".{MANIFEST}-", delete=False) as file:
        file.write(json.dumps(listed, indent=2) + "\n")
    try:
        os.chmod(file.name, 0o644)  # temporary files are private, and a cache may be shared
        os.replace(file.name, folder / MANIFEST)
    except OSError:
        os.unlink(file.name)
        raise
