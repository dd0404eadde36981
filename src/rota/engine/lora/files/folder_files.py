"""FolderFiles are the files of a PEFT folder: found, opened, and not understood yet."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from rota.core.errors import AdapterError, ModelError
from rota.engine.lora.files.beneath import LONGEST_PATH, beneath
from rota.engine.lora.files.tensor_file import TensorFile
from rota.engine.model.config_file import ConfigFile, read_json

CONFIG = "adapter_config.json"
SINGLE = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PICKLED = "adapter_model.bin"


class OutsideError(AdapterError):
    """A key's path leads to no folder in the key's root. One sentence for every case: none tells what is outside."""

    def __init__(self) -> None:
        super().__init__(
            "lora_path leads to no adapter folder in the adapter root of this key. Give the path of a folder there, "
            "relative to that root. No link in it may lead out."
        )


class FolderFiles:
    """Config and headers are read at the beginning of its `with` block, and tensors may be read inside it."""

    def __init__(
        self, path: str | Path, adapter_root: str | Path | None = None, key_root: str | Path | None = None
    ) -> None:
        """With a root, relative paths start there, and the folder and its files must lie within it.

        `key_root` is the root of one key, with links followed. It takes the place of `adapter_root`, and its refusals
        do not tell what lies outside of it.
        """
        if key_root is not None and len(str(path)) >= LONGEST_PATH:
            raise OutsideError  # before its millions of parts are looked at
        self._key_root = None if key_root is None else _unmoved(Path(key_root))
        self._root = self._key_root or (None if adapter_root is None else _resolve(Path(adapter_root)))
        self._stack = ExitStack()
        self.path = self._checked(Path(path) if self._root is None else self._root / path)
        self.config_path: Path
        self.config = b""  # as it stands in its file
        self.opened: list[TensorFile] = []

    @cached_property
    def fingerprint(self) -> bytes:
        """A digest of the config and of all headers. Folders that share it differ in nothing but numbers."""
        digest = hashlib.blake2b(self.config, digest_size=32)
        for file in self.opened:
            digest.update(file.size.to_bytes(8, "little"))
            digest.update(file.header)
        return digest.digest()

    def __enter__(self) -> Self:
        self.config_path = self._config_path()
        try:
            self.config = self.config_path.read_bytes()
            read_json(self.config_path, self.config)  # what is wrong with it is told before what is missing beside it
        except (OSError, ModelError) as error:
            told = str(error) if isinstance(error, ModelError) else f"{self.config_path} cannot be read ({error})."
            raise AdapterError(told) from error
        with self._stack:
            for name in self._file_names():
                self._open(name)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, name: str) -> None:
        path = self._checked(self.path / name)
        if not path.is_file():
            raise AdapterError(f"{path} is missing, which {INDEX} names; copy it there.")
        file = TensorFile(path)
        self._stack.callback(file.close)
        self.opened.append(file)

    def _config_path(self) -> Path:
        if not self.path.is_dir():
            raise OutsideError if self._key_root else AdapterError(f"There is no adapter folder at {self.path}.")
        config = self._checked(self.path / CONFIG)
        if not config.is_file():
            raise AdapterError(f"{self.path} is not an adapter folder: it has no {CONFIG}. Give a folder PEFT saved.")
        return config

    def _file_names(self) -> list[str]:
        # Each is followed before it is looked at. Else the answer would tell whether a file outside exists.
        if self._checked(self.path / SINGLE).is_file():
            return [SINGLE]
        if (index := self._checked(self.path / INDEX)).is_file():
            try:
                places = ConfigFile(index).section("weight_map")
            except ModelError as error:
                raise AdapterError(str(error)) from error
            return sorted(set(map(str, places.values())))
        if self._checked(self.path / PICKLED).is_file():
            raise AdapterError(
                f"{self.path / PICKLED} holds pickled weights, which can run code when they are read; Rota reads only "
                f"safetensors. Convert it with safetensors.torch.save_file(torch.load('{PICKLED}', weights_only=True), "
                f"'{SINGLE}')."
            )
        raise AdapterError(f"{self.path} has neither {SINGLE} nor {INDEX}; copy the adapter's weights there.")

    def _checked(self, path: Path) -> Path:
        if self._key_root is not None:
            place = beneath(self._key_root, path)
            if place is None:
                raise OutsideError
            return place
        resolved = _resolve(path)
        if self._root is not None and not resolved.is_relative_to(self._root):
            # The target is not named: a client over HTTP must not learn where links lead.
            raise AdapterError(f"{path} leads outside the adapter root {self._root}.")
        return resolved


def _resolve(path: Path) -> Path:
    """The path with links followed: a name alone does not say where a file lies."""
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"{str(path)!r} is no path that can be followed ({error}).") from error


def _unmoved(root: Path) -> Path:
    """A key's root, if it is still the folder that it was when the key was read, and no link has taken its place."""
    if _resolve(root) != root:
        raise OutsideError
    return root
