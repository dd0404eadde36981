"""A file of groups lies beside the weights of a folder that was converted from four and eight bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rota.engine.parallel.shard import Cut
from rota.engine.quantised.groups import GROUP, MIDDLE, Groups, side_by_side
from rota.engine.quantised.names import CODES, GROUPS_FILE, MINIMA, SCALES


class GroupsFile:
    """Groups by the names of their weights; empty if there is no file."""

    def __init__(self, folder: Path) -> None:
        path = folder / GROUPS_FILE
        self._file: Any = safe_open(path, framework="pt") if path.is_file() else None
        self._names = frozenset(self._file.keys()) if self._file is not None else frozenset()

    @property
    def is_there(self) -> bool:
        return self._file is not None

    def find(self, name: str, cut: Cut | None = None) -> Groups | None:
        """The groups of a weight, or of a stretch of it that cuts no group; None if the file has none for it."""
        if name + CODES not in self._names:
            return None
        is_byte = self._file.get_slice(name + CODES).get_dtype() == "I8"
        codes = self._tensor(name + CODES, cut, 1 if is_byte else 2)
        scales = self._tensor(name + SCALES, cut, GROUP).float()
        if is_byte:
            return side_by_side(codes, scales)
        return Groups(codes, scales, self._tensor(name + MINIMA, cut, GROUP).float() + MIDDLE * scales)

    def _tensor(self, name: str, cut: Cut | None, inputs: int) -> Tensor:
        """A tensor whose every number stands for so many inputs."""
        if cut is None:
            whole: Tensor = self._file.get_tensor(name)
            return whole
        width = inputs if cut.axis else 1
        stretch = slice(cut.first // width, cut.end // width)
        part: Tensor = self._file.get_slice(name)[(slice(None),) * cut.axis + (stretch,)]
        # The products' packing reads rows one after the other, and columns of a file lie apart.
        return part.contiguous()
