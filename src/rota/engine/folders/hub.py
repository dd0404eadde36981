"""A model's name is a folder on this machine, or the name of a model that a hub has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from rota.core.errors import ModelError

Download = Callable[[str], str]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The files that the engine and the tokenizer read; not the same weights in other formats.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def model_folder(name: str, download: Download | None = None) -> Path:
    """The folder of a model; downloads a model that is not here. Raises ModelError if that fails."""
    folder = Path(name).expanduser()
    if folder.exists() or not _HUB_NAME.fullmatch(name):
        return _no_adapter(folder)  # if it does not exist, the code that reads it says so
    try:
        found = Path((download or _download)(name))
    except Exception as error:  # the border to the hub's library, which raises many kinds of errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"There is no folder {name}, and a hub does not give a model of that name: {reason}") from None
    return _no_adapter(found)


def _no_adapter(folder: Path) -> Path:
    """The same folder. Raises ModelError if an adapter lies there, and no model."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return folder
    if (folder / "config.json").exists():
        return folder
    base = config.get("base_model_name_or_path") or "another model"
    raise ModelError(
        f"{folder} is an adapter of {base}. Serve {base}, and give the adapter with --lora-paths {folder}."
    )


def _download(name: str) -> str:
    # Imported here: the import takes a while, and few users need it.
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=_WANTED)
