"""A manifest lists the files of a folder, so that a damaged or unfinished folder is found before it is used."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

MANIFEST = "manifest.json"
# Bytes of each file that every start reads: whole texts, and headers of weights. Weights are known by their size.
HEAD_BYTES = 4 << 20


def write_manifest(folder: Path) -> None:
    """List every file of a folder; the manifest is written last."""
    listed = {path.name: _traits(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(listed, indent=2) + "\n", "utf-8")


def damage_of(folder: Path) -> str:
    """How a folder differs from its manifest, in a few words; empty if it does not differ."""
    try:
        listed = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or cannot be read"
    if not isinstance(listed, dict):
        return f"{MANIFEST} lists no files"
    for name, traits in listed.items():
        try:
            is_as_written = _traits(folder / name) == traits
        except OSError:
            return f"{name} is missing or cannot be read"
        if not is_as_written:
            return f"{name} is not as it was written"
    return ""


def _traits(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "head_crc32": zlib.crc32(file.read(HEAD_BYTES))}
