"""An AdapterFolder is an open PEFT folder: a config, and the factors of each module."""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rota.core.errors import AdapterError, ModelError
from rota.engine.lora.files.beneath import LONGEST_PATH, beneath
from rota.engine.lora.files.names import ENDS
from rota.engine.lora.files.peft_config import PeftConfig, read_config
from rota.engine.lora.files.tensor_file import Stored, TensorFile, header_bytes
from rota.engine.model.config_file import ConfigFile

CONFIG = "adapter_config.json"
SINGLE = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PICKLED = "adapter_model.bin"
# PEFT leaves the adapter's name out of its files; a state dict saved as it is has the name.
MODULE = r"base_model\.model\.(?P<module>.+)"
KINDS = {
    "a": re.compile(rf"{MODULE}\.lora_(A(\.[^.]+)?\.weight|embedding_A(\.[^.]+)?)"),
    "b": re.compile(rf"{MODULE}\.lora_(B(\.[^.]+)?\.weight|embedding_B(\.[^.]+)?)"),
    "b_bias": re.compile(rf"{MODULE}\.lora_B(\.[^.]+)?\.bias"),
    "magnitude": re.compile(rf"{MODULE}\.lora_magnitude_vector(\.[^.]+)?(\.weight)?"),
    "bias": re.compile(rf"{MODULE}\.bias"),
    "tokens": re.compile(rf"{MODULE}\.token_adapter\.trainable_tokens_delta(\.[^.]+)?"),
    "base": re.compile(rf"{MODULE}\.base_layer\.weight"),
    # As PEFT saves what `modules_to_save` names: it leaves that word out, a state dict has it.
    "matrix": re.compile(
        rf"base_model\.model\.(?P<module>{'|'.join(map(re.escape, ENDS))})(\.modules_to_save(\.[^.]+)?)?\.weight"
    ),
}
# What VeLoRA keeps for its backward pass; its forward pass is that of plain factors.
OF_TRAINING = re.compile(rf"{MODULE}\.lora_velora_embed(\.[^.]+)?")


@dataclass(slots=True)
class Factors:
    """A module's two factors, and what may come with them; any may be missing from the file."""

    a: Stored | None = None  # [rank, inputs]; an embedding's inputs are tokens
    b: Stored | None = None  # [outputs, rank]
    b_bias: Stored | None = None  # [outputs]
    magnitude: Stored | None = None  # [outputs], of a DoRA
    base: Stored | None = None  # a copy of the model's own matrix, which PEFT saves of an embedding or a head


class OutsideError(AdapterError):
    """A key's path leads to no folder in the key's root. One sentence for every case: none tells what is outside."""

    def __init__(self) -> None:
        super().__init__(
            "lora_path leads to no adapter folder in the adapter root of this key. Give the path of a folder there, "
            "relative to that root. No link in it may lead out."
        )


class AdapterFolder:
    """Tensors may be read inside its `with` block; headers and config are read at its beginning."""

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
        self.config: PeftConfig
        self.files: list[TensorFile] = []
        self.factors: dict[str, Factors] = {}
        self.biases: dict[str, Stored] = {}  # by module: what stands in the place of the model's own bias
        self.tokens: dict[str, Stored] = {}  # by module: rows of its own for some tokens
        self.matrices: dict[str, Stored] = {}  # by module: what stands in the place of the model's own matrix
        self.other_tensors: list[Stored] = []  # tensors of no kind that is served

    def fingerprint(self) -> bytes:
        """A digest of the config and of all headers. Folders that share it can be served by the same models."""
        digest = hashlib.blake2b(self._config_path().read_bytes(), digest_size=32)
        for name in self._file_names():
            digest.update(header_bytes(self._checked(self.path / name)))
        return digest.digest()

    def __enter__(self) -> AdapterFolder:
        self.config = read_config(self._config_path())
        with self._stack:
            for name in self._file_names():
                self._open(name)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

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

    def _open(self, name: str) -> None:
        path = self._checked(self.path / name)
        if not path.is_file():
            raise AdapterError(f"{path} is missing, which {INDEX} names; copy it there.")
        file = TensorFile(path)
        self._stack.callback(file.close)
        self.files.append(file)
        for stored in file.tensors.values():
            self._sort_in(stored)

    def _sort_in(self, stored: Stored) -> None:
        for kind, name in KINDS.items():
            if found := name.fullmatch(stored.name):
                self._take(kind, found["module"].removesuffix(".base_layer"), stored)
                return
        if not OF_TRAINING.fullmatch(stored.name):
            self.other_tensors.append(stored)

    def _take(self, kind: str, module: str, stored: Stored) -> None:
        apart = {"bias": self.biases, "tokens": self.tokens, "matrix": self.matrices}.get(kind)
        former = getattr(self.factors.get(module), kind, None) if apart is None else apart.get(module)
        if former is not None:
            raise AdapterError(
                f"{stored.file.path}: the tensor '{stored.name}' is there twice, in two spellings or two files; an "
                "adapter folder holds one adapter."
            )
        if apart is not None:
            apart[module] = stored
        else:
            setattr(self.factors.setdefault(module, Factors()), kind, stored)

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
