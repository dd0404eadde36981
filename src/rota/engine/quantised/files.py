"""A file of groups lies beside the weights of a folder that was converted from four and eight bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rota.engine.quantised.groups import MIDDLE, Groups, side_by_side
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

    def find(self, name: str) -> Groups | None:
        """The groups of a weight; None if the file has none for it."""
        if name + CODES not in self._names:
            return None
        codes, scales = self._tensor(name + CODES), self._tensor(name + SCALES).float()
        if codes.dtype is torch.int8:
            return side_by_side(codes, scales)
        return Groups(codes, scales, self._tensor(name + MINIMA).float() + MIDDLE * scales)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor
