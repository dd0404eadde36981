"""An AdapterFolder is an open PEFT folder that is understood: a config, and the factors of each module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rota.core.errors import AdapterError
from rota.core.extras import Extra
from rota.engine.lora.files.folder_files import FolderFiles
from rota.engine.lora.files.names import ENDS
from rota.engine.lora.files.peft_config import read_config
from rota.engine.lora.files.tensor_file import Stored

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


class AdapterFolder:
    """Tensors may be read as long as its files are open."""

    def __init__(self, files: FolderFiles) -> None:
        self.path = files.path
        self.config = read_config(files.config_path, files.config)
        self.files = files.opened
        self.factors: dict[str, Factors] = {}
        self.biases: dict[str, Stored] = {}  # by module: what stands in the place of the model's own bias
        self.tokens: dict[str, Stored] = {}  # by module: rows of its own for some tokens
        self.matrices: dict[str, Stored] = {}  # by module: what stands in the place of the model's own matrix
        self.other_tensors: list[Stored] = []  # tensors of no kind that is served
        for file in self.files:
            for stored in file.tensors.values():
                self._sort_in(stored)

    @property
    def is_plain(self) -> bool:
        """Does it hold nothing but the factors of layers?"""
        extras = self.config.extras is not Extra.NONE or self.config.has_factor_biases or self.config.is_dora
        ends = any(module in self.factors for module in ENDS)
        return not (extras or ends or self.biases or self.tokens or self.matrices or self.other_tensors)

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


@contextmanager
def open_folder(path: str | Path) -> Iterator[AdapterFolder]:
    """A folder that may lie anywhere."""
    with FolderFiles(path) as files:
        yield AdapterFolder(files)
