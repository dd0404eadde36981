"""A GGUF file's blocks of 32 weights become codes, scales and minima, each in one array.

Q4_1    [ scale f16 | minimum f16 | 16 bytes: code i below, code i + 16 above ]      code * scale + minimum
Q8_0    [ scale f16 | 32 codes int8 ]                                                code * scale
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from rota.engine.quantised.names import CODES, MINIMA, SCALES
from rota.engine.weights.safetensors_writer import Entry

Bytes = npt.NDArray[np.uint8]


class Part(NamedTuple):
    """One tensor of a file of groups; its first dimension is the matrix's."""

    entry: Entry
    values: npt.NDArray[Any]


def group_parts(name: str, data: Bytes, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> list[Part]:
    """The parts of a tensor in groups of four or eight bits; empty for any other tensor."""
    if kind == gguf.GGMLQuantizationType.Q4_1:
        blocks = data.reshape(shape[0], -1, 20)
        halves = blocks[:, :, 4:]
        codes = np.concatenate((halves & 15, halves >> 4), axis=2).reshape(shape)
        return [
            _part(name + CODES, "U8", codes[:, 0::2] | (codes[:, 1::2] << 4)),
            _part(name + SCALES, "F16", _numbers(blocks, 0)),
            _part(name + MINIMA, "F16", _numbers(blocks, 2)),
        ]
    if kind == gguf.GGMLQuantizationType.Q8_0:
        blocks = data.reshape(shape[0], -1, 34)
        codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(shape)
        return [_part(name + CODES, "I8", codes), _part(name + SCALES, "F16", _numbers(blocks, 0))]
    return []


def _part(name: str, dtype: str, values: npt.NDArray[Any]) -> Part:
    return Part(Entry(name, dtype, values.shape, values.itemsize), values)


def _numbers(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """[rows, blocks] the numbers that begin at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]
