"""An AdapterFolder is an open PEFT folder that is understood: a config, and the factors of each module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rota.core.errors import AdapterError
from rota.core.extras import Extra
from rota.engine.lora.files.folder_files import FolderFiles
from rota.engine.lora.files.names import ENDS
from rota.engine.lora.files.outline import OTHER, Header, Outline, OutlineOf, answered
from rota.engine.lora.files.tensor_file import Stored
from rota.engine.model.sites import module_names


@dataclass(slots=True)
class Factors:
    """A module's two factors, and what may come with them; any may be missing from the file."""

    a: Stored | None = None  # [rank, inputs]; an embedding's inputs are tokens
    b: Stored | None = None  # [outputs, rank]
    b_bias: Stored | None = None  # [outputs]
    magnitude: Stored | None = None  # [outputs], of a DoRA
    base: Stored | None = None  # a copy of the model's own matrix, which PEFT saves of an embedding or a head

    @property
    def stored(self) -> list[Stored]:
        """What is served of them."""
        return [one for one in (self.a, self.b, self.b_bias, self.magnitude) if one is not None]


class AdapterFolder:
    """Tensors may be read as long as its files are open."""

    def __init__(self, files: FolderFiles, layers: int = 0) -> None:
        """For a model with so many layers; 0: for any model. Raises AdapterError if it cannot be understood."""
        self.path = files.path
        self.files = files.opened
        headers = tuple(Header(str(file.path), file.header) for file in self.files)
        modules = (*module_names(layers), *ENDS) if layers else ()
        outline = answered(files.ask, OutlineOf(str(files.config_path), files.config, headers, modules))
        assert isinstance(outline, Outline), "it is what was asked for"
        self.config = outline.config
        self.factors: dict[str, Factors] = {}
        self.biases: dict[str, Stored] = {}  # by module: what stands in the place of the model's own bias
        self.tokens: dict[str, Stored] = {}  # by module: rows of its own for some tokens
        self.matrices: dict[str, Stored] = {}  # by module: what stands in the place of the model's own matrix
        self.other_tensors: list[Stored] = []  # tensors of no kind that is served
        for file, entries in zip(self.files, outline.files, strict=True):
            for entry, stored in zip(entries, file.describe(entries), strict=True):
                self._take(entry.kind, entry.module, stored)

    @property
    def is_plain(self) -> bool:
        """Does it hold nothing but the factors of layers?"""
        extras = self.config.extras is not Extra.NONE or self.config.has_factor_biases or self.config.is_dora
        ends = any(module in self.factors for module in ENDS)
        return not (extras or ends or self.biases or self.tokens or self.matrices or self.other_tensors)

    def _take(self, kind: str, module: str, stored: Stored) -> None:
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


@contextmanager
def open_folder(path: str | Path, layers: int = 0) -> Iterator[AdapterFolder]:
    """A folder that may lie anywhere."""
    with FolderFiles(path) as files:
        yield AdapterFolder(files, layers)
