"""A model's name leads to a folder: one on this machine, or one that a hub has under that name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from rota.core.errors import ModelError

Download = Callable[[str], str]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What an engine and a tokenizer read; not the same weights once more in other formats.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def model_folder(name: str, download: Download | None = None) -> Path:
    """Where a model lies; downloads one that is not here. Raises ModelError if that fails."""
    folder = Path(name).expanduser()
    if folder.exists() or not _HUB_NAME.fullmatch(name):
        return folder  # if there is nothing, whoever reads it says so
    try:
        return Path((download or _download)(name))
    except Exception as error:  # the hub's library has many ways to say that it could not
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"There is no folder {name}, and a hub does not give a model of that name: {reason}") from None


def _download(name: str) -> str:
    # Here because it takes a while to import, and few need it.
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=_WANTED)
