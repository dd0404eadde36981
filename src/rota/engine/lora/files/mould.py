"""A mould is the memory in which an adapter is put together, and the way in which a folder's files fill it.

Folders with the same config and the same headers, to the byte, share a mould: all versions that a training run saves,
and all adapters of one recipe. Then nothing is parsed or checked again but the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rota.engine.lora.files.filling import Filling
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.tensor_file import TensorFile
from rota.engine.lora.host import StackedSite


@dataclass(frozen=True, slots=True, kw_only=True)
class Mould:
    """For one adapter at a time."""

    fingerprint: bytes
    run: Tensor
    scratch: Tensor
    sites: list[StackedSite]  # of the run
    site_ranks: tuple[int, ...]
    ranks: Tensor
    filling: Filling
    is_plain: bool  # nothing but factors of layers was in the folder

    @property
    def is_enough(self) -> bool:
        """Need a folder's headers not be understood?"""
        return self.is_plain and self.filling.is_quick

    @property
    def size_bytes(self) -> int:
        return self.run.nbytes + self.scratch.nbytes

    def fill(self, files: Sequence[TensorFile], folder: AdapterFolder | None) -> bool:
        """False if numbers are not finite. Blocks on the disk. The folder is needed unless the mould is enough."""
        return self.filling.run(files, folder)
