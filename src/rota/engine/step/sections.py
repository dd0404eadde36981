"""Sections are named runs of numbers in one array: said once, packed on the host, unpacked on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int32]


class Layout:
    """Names and sizes of the sections, in the order in which they lie."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self.numbers = sum(sizes.values())

    def pack(self, values: Mapping[str, Numbers], padding: Mapping[str, int]) -> Numbers:
        """One array; what a section's values leave of its size is filled with the section's padding."""
        line = np.empty(self.numbers, np.int32)
        end = 0
        for name, size in self._sizes.items():
            section, start, end = values[name], end, end + size
            line[start : start + len(section)] = section
            if len(section) < size:
                line[start + len(section) : end] = padding[name]
        return line

    def unpack(self, line: Tensor) -> dict[str, Tensor]:
        """The sections by name, as views of the array."""
        return dict(zip(self._sizes, line.split(list(self._sizes.values())), strict=True))
