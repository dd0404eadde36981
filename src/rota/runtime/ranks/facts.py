"""Facts are what must be the same on all ranks, and on all machines: versions, flags and the model's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from rota.core.config import EngineConfig

# As installed: their versions change what a step computes, or what ranks tell each other.
_LIBRARIES = ("rota", "torch", "triton", "flashinfer-python")
# Folders differ between machines; what lies in them is compared. Only rank 0 loads the adapters to start with.
_MAY_DIFFER = {"model_path", "lora_paths"}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".index.json")
# Of each file so many pieces are read: another fine-tune differs everywhere, and a whole file may have 100 GB.
_PIECES, _PIECE_BYTES = 64, 4096


def facts(config: EngineConfig) -> dict[str, str]:
    """By name, each as a word."""
    return {**dict(_versions()), **dict(_flags(config)), **dict(_files(config))}


def difference(own: dict[str, str], others: dict[int, dict[str, str]]) -> str:
    """Which ranks differ from rank 0 in what, as a sentence; empty if none does."""
    found = [one for rank, theirs in sorted(others.items()) for one in compared("rank 0", own, f"rank {rank}", theirs)]
    return f"All ranks must have the same model, flags and versions: {'; '.join(found)}." if found else ""


def compared(us: str, own: dict[str, str], them: str, theirs: dict[str, str]) -> list[str]:
    """What differs between two, each difference as a clause with both values."""
    return [
        f"{them} has {theirs.get(name, 'nothing')} for {name}, and {us} has {own.get(name, 'nothing')}"
        for name in sorted(own.keys() | theirs.keys())
        if own.get(name) != theirs.get(name)
    ]


def versions(*others: str) -> dict[str, str]:
    """Of Rota and the libraries that decide what a step computes, and of other libraries."""
    return dict(_versions(others))


def _versions(others: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    for name in (*_LIBRARIES, *others):
        for found in metadata.distributions(name=name):
            yield f"the version of {name}", found.version


def _flags(config: EngineConfig) -> Iterator[tuple[str, str]]:
    for section in (config.model, config.cache, config.scheduler, config.lora, config.policy):
        for each in fields(section):
            if each.name not in _MAY_DIFFER:
                yield f"--{each.name.replace('_', '-')}", str(getattr(section, each.name))


def _files(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Digests; a folder that is missing is the engine's to refuse."""
    path = Path(config.model.model_path or "")
    present = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    yield "the model's config.json", _digest(each for each in present if each.name == "config.json")
    if config.model.load_format != "dummy":
        yield "the model's weights", _digest(each for each in present if each.name.endswith(_WEIGHTS))


def _digest(paths: Iterable[Path]) -> str:
    """Of names, sizes and pieces of the contents."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(_PIECE_BYTES, size // _PIECES)):
                file.seek(start)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]
