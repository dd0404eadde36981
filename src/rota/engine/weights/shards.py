"""Shards are a folder's safetensors files, opened as memory maps, from which tensors are read by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile
from rota.engine.parallel.shard import Cut
from rota.engine.weights.finite import is_finite

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# In safetensors' words: what a model's plain tensors may be stored as.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NOT_FINITE = "has values that are NaN or infinite, so the model cannot answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Where a tensor's numbers lie: the bytes [start, end) of a file."""

    path: Path
    start: int
    end: int
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        return (self.end - self.start) // self.dtype.itemsize

    def rows(self, cut: Cut) -> FileRange:
        """Where some of the tensor's rows lie."""
        row_bytes = (self.end - self.start) // cut.of
        return replace(self, start=self.start + cut.first * row_bytes, end=self.start + cut.end * row_bytes)


def read_places(path: Path) -> dict[str, FileRange]:
    """By name, from the header of a file that the library has checked; tensors of other kinds are left out."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    places = {}
    for name, entry in header.items():
        if entry.get("dtype") in DTYPES:
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            places[name] = FileRange(path=path, start=start, end=end, dtype=DTYPES[entry["dtype"]])
    return places


class Shards:
    """Knows which file holds which tensor; closes the memory maps at the end of the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._checked: set[str] = set()
        # Files by tensor name, and the open files.
        self._places: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._headers: dict[str, dict[str, FileRange]] = {}

    def __enter__(self) -> Shards:
        with self._stack:
            if (self._folder / SINGLE).is_file():
                self._places = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
            elif (self._folder / INDEX).is_file():
                self._places = self._read_index()
            else:
                raise ModelError(
                    f"{self._folder} has neither {SINGLE} nor {INDEX}; download the weights as safetensors, or use "
                    "--load-format dummy for random ones."
                )
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def check_form(self, name: str, shapes: Sequence[tuple[int, ...]], kinds: Sequence[str]) -> None:
        """Raise unless the tensor exists, has one of the shapes, and is of one of the kinds."""
        if name not in self._places:
            raise ModelError(f"{self._folder} lacks the tensor '{name}', which its config.json calls for.")
        path = self._folder / self._places[name]
        file = self._files[self._places[name]]
        try:
            found = file.get_slice(name)
        except SafetensorError as error:
            raise ModelError(
                f"{path} lacks the tensor '{name}', which {INDEX} says is there; download both again."
            ) from error
        if tuple(found.get_shape()) not in shapes:
            raise ModelError(
                f"{path}: the tensor '{name}' has the shape {found.get_shape()}, but config.json makes it "
                f"{' or '.join(str(list(shape)) for shape in shapes)}; config.json and weights are not of the same "
                "model."
            )
        if found.get_dtype() not in kinds:
            raise ModelError(
                f"{path}: the tensor '{name}' is stored as {found.get_dtype()}; Rota reads {', '.join(kinds)}."
            )
        self._checked.add(name)

    def pass_over_zeros(self, name: str) -> None:
        """Count a tensor as used if it is there, and all of it is zero."""
        if name in self._places and name not in self._checked and not self.read(name).any():
            self._checked.add(name)

    def check_all_known(self) -> None:
        """Raise if a tensor was not used: to leave out a bias, for example, would give wrong answers silently."""
        spare = [name for name in self._places if name not in self._checked and not _is_redundant(name)]
        if spare:
            raise ModelError(
                f"{self._folder / self._places[spare[0]]} holds the tensor '{spare[0]}', which the architecture in "
                f"config.json does not use ({len(spare)} such tensors); config.json and weights are not of the same "
                "model."
            )

    def copy(self, name: str, target: Tensor, cut: Cut | None = None) -> None:
        """Copy a checked tensor, or a stretch of it, into the target, to its device and precision."""
        stretches = () if cut is None else (slice(None),) * cut.axis + (slice(cut.first, cut.end),)
        target.copy_(self.read(name, *stretches))

    def place(self, name: str, cut: Cut | None = None) -> FileRange | None:
        """Where a checked tensor or some of its rows lie; None if their bytes do not lie one after the other."""
        file = self._places[name]
        if file not in self._headers:
            self._headers[file] = read_places(self._folder / file)
        place = self._headers[file].get(name)
        if place is None or cut is None:
            return place
        return place.rows(cut) if cut.axis == 0 else None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._places[name]].get_slice(name).get_shape())

    def read(self, name: str, *stretches: slice) -> Tensor:
        """A checked tensor, or stretches of its first axes, as it is stored; no more is read."""
        file = self._files[self._places[name]]
        found: Tensor = file.get_slice(name)[stretches] if stretches else file.get_tensor(name)
        return found

    def error(self, name: str, problem: str) -> ModelError:
        """What is wrong with a tensor that is there."""
        return ModelError(f"{self._folder / self._places[name]}: the tensor '{name}' {problem}.")

    def not_finite_error(self, name: str, dtype: torch.dtype) -> ModelError:
        """Why a tensor in this precision has values that are not finite."""
        too_large = f"has values too large for {dtype}; serve the model in bfloat16 or float32"
        if name not in self._places:
            return ModelError(f"{self._folder}: the matrix '{name}' {too_large}.")
        is_fine = is_finite(self._files[self._places[name]].get_tensor(name))
        return self.error(name, too_large if is_fine else f"{NOT_FINITE}; get other weights")

    def _read_index(self) -> dict[str, str]:
        index = ConfigFile(self._folder / INDEX)
        places = index.section("weight_map")
        for file in sorted(set(map(str, places.values()))):
            self._open(file)
        return places

    def _open(self, file: str) -> Any:
        path = self._folder / file
        if not path.is_file():
            raise ModelError(f"{path} is missing, which {INDEX} names; download it.")
        try:
            opened = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is truncated or corrupt ({error}); download it again.") from error
        self._files[file] = opened
        return opened


def _is_redundant(name: str) -> bool:
    """Old folders store rotary frequencies, and some tied models store the embedding twice; neither is needed."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
