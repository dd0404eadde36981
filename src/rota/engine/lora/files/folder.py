"""An AdapterFolder is an open PEFT folder that is understood: a config, and the factors of each module."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from rota.core.adapter import Extra
from rota.core.errors import AdapterChangedError, AdapterError
from rota.engine.lora.files.outline import (
    LONGEST_CONFIG,
    LONGEST_HEADER,
    LONGEST_HEADERS,
    MOST_FILES,
    OTHER,
    Files,
    FilesOf,
    Header,
    Inquire,
    Outline,
    OutlineOf,
    answer,
    answered,
)
from rota.engine.lora.files.peft_config import END_MODULES
from rota.engine.lora.files.tensor_file import StoredTensor, TensorFile
from rota.engine.model.sites import module_names
from rota.sources.beneath import Beneath, LeavesError

# ── folder files ────────────────────────────────────────────────────────────────────────────────────────────────────
# FolderFiles are the files of a PEFT folder: found, opened, and not understood yet.

CONFIG = "adapter_config.json"
SINGLE = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PICKLED = "adapter_model.bin"
# The root of a folder that may lie anywhere.
ANYWHERE = Path("/")


class OutsideError(AdapterError):
    """A key's path leads to no folder in the key's root. One sentence for every case: none tells what is outside."""

    def __init__(self) -> None:
        super().__init__(
            "lora_path leads to no adapter folder in the adapter root of this key. Give the path of a folder there, "
            "relative to that root. No link in it may lead out."
        )


class FolderFiles:
    """Config and headers are read at the beginning of its `with` block, and tensors may be read inside it.

    All is read from what was opened first: a file that takes the place of another later is not seen.
    """

    def __init__(
        self,
        path: str | Path,
        adapter_root: str | Path | None = None,
        key_root: str | Path | None = None,
        ask: Inquire = answer,
    ) -> None:
        """With a root, relative paths start there, and the folder and its files must lie within it.

        `key_root` is the root of one key, with links followed. It takes the place of `adapter_root`, and its refusals
        do not tell what lies outside of it. What the files say is understood by `ask`.
        """
        self.ask = ask
        self._asked, self._is_keys = path, key_root is not None
        if key_root is not None:
            self._root = Path(key_root)
        else:
            self._root = ANYWHERE if adapter_root is None else _resolve(Path(adapter_root))
        self._stack = ExitStack()
        self._place: Beneath
        self.path: Path
        self.config_path: Path
        self.config = b""  # as it stands in its file
        self.opened: list[TensorFile] = []

    @cached_property
    def fingerprint(self) -> bytes:
        """A digest of the config and of all headers. Folders that share it differ in nothing but numbers."""
        digest = hashlib.blake2b(len(self.config).to_bytes(8, "little") + self.config, digest_size=32)
        for file in self.opened:
            digest.update(file.size.to_bytes(8, "little") + len(file.header).to_bytes(8, "little"))
            digest.update(file.header)
        return digest.digest()

    def sealed(self, former: str = "") -> str:
        """A digest of all that was read of the files: of config and headers first, then of the numbers.

        Raises AdapterChangedError if a former read found something else, AdapterError if a file was written to
        meanwhile. Sizes and headers are in the digest. Times and inodes are not: they say nothing that the content does
        not say, and a file that is copied back, or brought to another machine, has others. Nor would they make a
        shorter way. What is written through a mapping of a file need not change its times, so all numbers are read
        each time, and the thread that reads them digests them while it has them at hand.
        """
        digest = hashlib.sha256()
        for file in self.opened:
            digest.update(file.digest)
        seal = self.fingerprint.hex() + digest.hexdigest()
        if former and seal != former:
            raise AdapterChangedError(f"{self.path} changed since it was loaded.")
        return seal

    def refuse_others_than(self, seal: str) -> None:
        """Raises AdapterChangedError if config or headers are others than those of a seal. Nothing is parsed."""
        if not seal.startswith(self.fingerprint.hex()) and seal:
            raise AdapterChangedError(f"{self.path} changed since it was loaded.")

    def __enter__(self) -> Self:
        with self._stack:
            self._enter_folder()
            # Without a file the config is in the weights' metadata, as in some uploads.
            self.config_path, self.config = self._content(CONFIG, LONGEST_CONFIG) or (self.path / CONFIG, b"")
            for name in self._file_names():
                self._open(name)
                if sum(len(file.header) for file in self.opened) > LONGEST_HEADERS:
                    raise AdapterError(f"{self.path} has headers of more than {LONGEST_HEADERS:,} bytes in all.")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _enter_folder(self) -> None:
        asked = self._asked if self._is_keys or self._root == ANYWHERE else self._root / self._asked
        try:
            self._place = Beneath(self._root, looks_outside=not self._is_keys)
            self._stack.callback(self._place.close)
            self._place.enter(asked if self._is_keys else _resolve(Path(asked)))
        except LeavesError:
            raise self._outside(asked) from None
        except (OSError, ValueError) as error:
            raise OutsideError if self._is_keys else AdapterError(f"There is no adapter folder at {asked}.") from error
        self.path = self._place.path

    def _outside(self, path: str | Path) -> AdapterError:
        # The target is not named: a client over HTTP must not learn where links lead.
        return OutsideError() if self._is_keys else AdapterError(f"{path} leads outside the adapter root {self._root}.")

    def _opened(self, name: str) -> tuple[int, Path] | None:
        """A descriptor of a file, and where the file lies; None if there is none."""
        try:
            return self._place.open(name)
        except LeavesError:
            raise self._outside(self.path / name) from None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise AdapterError(f"{self.path / name} cannot be opened ({why}).") from error

    def _content(self, name: str, most: int) -> tuple[Path, bytes] | None:
        """Where a file lies that is no longer than `most` bytes, and what is in it; None if there is none."""
        opened = self._opened(name)
        if opened is None:
            return None
        descriptor, path = opened
        try:
            with open(descriptor, "rb") as file:
                content = file.read(most + 1)
        except OSError as error:
            raise AdapterError(f"{path} cannot be read ({error}).") from error
        if len(content) > most:
            raise AdapterError(f"{path} is longer than {most:,} bytes, and no such file of an adapter is.")
        return path, content

    def _open(self, name: str) -> None:
        opened = self._opened(name)
        if opened is None:
            raise AdapterError(f"{self.path / name} is missing, which {INDEX} names; copy it there.")
        file = TensorFile(*opened)
        self._stack.callback(file.close)
        self.opened.append(file)

    def _file_names(self) -> list[str]:
        # What leads out is refused before it is looked at. Else the answer would tell whether a file outside exists.
        if self._has(SINGLE):
            return [SINGLE]
        if index := self._content(INDEX, LONGEST_HEADER):
            found = answered(self.ask, FilesOf(str(index[0]), index[1]))
            assert isinstance(found, Files), "it is what was asked for"
            if len(found.names) > MOST_FILES:
                raise AdapterError(f"{index[0]} names {len(found.names)} files; Rota reads {MOST_FILES} at most.")
            return list(found.names)
        if self._has(PICKLED):
            raise AdapterError(
                f"{self.path / PICKLED} holds pickled weights, which can run code when they are read; Rota reads only "
                f"safetensors. Convert it with safetensors.torch.save_file(torch.load('{PICKLED}', weights_only=True), "
                f"'{SINGLE}')."
            )
        if not self.config:
            raise AdapterError(f"{self.path} is not an adapter folder: it has no {CONFIG}. Give a folder PEFT saved.")
        raise AdapterError(f"{self.path} has neither {SINGLE} nor {INDEX}; copy the adapter's weights there.")

    def _has(self, name: str) -> bool:
        if opened := self._opened(name):
            os.close(opened[0])
        return opened is not None


def _resolve(path: Path) -> Path:
    """The path with links followed: a name alone does not say where a file lies."""
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise AdapterError(f"{str(path)!r} is no path that can be followed ({error}).") from error


@dataclass(slots=True)
class Factors:
    """A module's two factors, and what may come with them; any may be missing from the file."""

    a: StoredTensor | None = None  # [rank, inputs]; an embedding's inputs are tokens
    b: StoredTensor | None = None  # [outputs, rank]
    b_bias: StoredTensor | None = None  # [outputs]
    magnitude: StoredTensor | None = None  # [outputs], of a DoRA
    base: StoredTensor | None = None  # a copy of the model's own matrix, which PEFT saves of an embedding or a head

    @property
    def stored(self) -> list[StoredTensor]:
        """What is served of them."""
        return [one for one in (self.a, self.b, self.b_bias, self.magnitude) if one is not None]


class AdapterFolder:
    """Tensors may be read as long as its files are open."""

    def __init__(self, files: FolderFiles, layers: int = 0) -> None:
        """For a model with so many layers; 0: for any model. Raises AdapterError if it cannot be understood."""
        self.path = files.path
        self.files = files.opened
        headers = tuple(Header(str(file.path), file.header) for file in self.files)
        modules = (*module_names(layers), *END_MODULES) if layers else ()
        outline = answered(files.ask, OutlineOf(str(files.config_path), files.config, headers, modules))
        assert isinstance(outline, Outline), "it is what was asked for"
        self.config = outline.config
        self.factors: dict[str, Factors] = {}
        self.biases: dict[str, StoredTensor] = {}  # by module: what stands in the place of the model's own bias
        self.tokens: dict[str, StoredTensor] = {}  # by module: rows of its own for some tokens
        self.matrices: dict[str, StoredTensor] = {}  # by module: what stands in the place of the model's own matrix
        self.other_tensors: list[StoredTensor] = []  # tensors of no kind that is served
        for file, entries in zip(self.files, outline.files, strict=True):
            for entry, stored in zip(entries, file.describe(entries), strict=True):
                self._take(entry.kind, entry.module, stored)

    @property
    def is_plain(self) -> bool:
        """Does it hold nothing but the factors of layers?"""
        extras = self.config.extras is not Extra.NONE or self.config.has_factor_biases or self.config.is_dora
        ends = any(module in self.factors for module in END_MODULES)
        return not (extras or ends or self.biases or self.tokens or self.matrices or self.other_tensors)

    def _take(self, kind: str, module: str, stored: StoredTensor) -> None:
        if kind == "training":
            return
        if kind == OTHER:
            self.other_tensors.append(stored)
            return
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
