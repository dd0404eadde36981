"""Packed is a matrix in few bits in the order in which a GPU's kernels read it: whole tiles, no padding of rows.

A word of 32 bits holds the codes of one output that one thread of a tensor core multiplies. Of 16 inputs such a thread
takes two and two: thread 1 takes 2, 3, 10 and 11. So a word's halves are neighbours, and its pairs lie eight apart.

    four bits, thread t of 32 inputs       bits 16 … 31                        bits 0 … 15
                                      [ 25+2t | 17+2t | 9+2t | 1+2t ]   [ 24+2t | 16+2t | 8+2t | 2t ]
    eight bits, thread t of 16 inputs
                                      [       9+2t    |   1+2t      ]   [      8+2t     |    2t     ]

Words in four bits lie in tiles of 64 outputs and a step of inputs, 4 KiB in one piece:

    [tiles of outputs] [steps] [64 outputs] [step / 8 words]

Words in eight bits lie output by output, because torch's scaled product reads the same matrix: there x gets the same
order of inputs (`in_word_order`). A product does not depend on it.

A group's mark is its scale, in the upper 24 bits of a float32, and its zero in the lower eight. 16 bits of any kind are
exact in 24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.quantised.codes import Codes, Scaled

TILE = 64  # outputs
LONGEST_STEP = 128
# A word's worth of four bits for each of the four threads that share an output.
SHORTEST_STEP = 32
LARGEST_ZERO = 127


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Packed:
    """A matrix [outputs, inputs], packed."""

    words: Tensor  # int32
    marks: Tensor  # four bits: [groups, padded outputs] int32; eight bits: [outputs] float32, the scales
    bits: Literal[4, 8]
    outputs: int
    inputs: int
    padded: int  # outputs, and those that fill the last tile
    step: int  # inputs
    per_group: int  # steps in a group

    @property
    def steps(self) -> int:
        return -(-self.inputs // self.step)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Words from one to the next tile of outputs, output and step."""
        width = self.step * self.bits // 32
        if self.bits == 4:
            return self.steps * TILE * width, width, TILE * width
        return TILE * self.inputs // 4, self.inputs // 4, width

    @property
    def size_bytes(self) -> int:
        return self.words.nbytes + self.marks.nbytes


def step_of(codes: Codes) -> int | None:
    """The inputs that the kernels multiply at a time; None if the groups are not of a kind they know.

    Groups must be equally long, in a row after the inputs were sorted by them, and zeros whole.
    """
    inputs, groups = codes.codes.shape[1], codes.scales.shape[1]
    width = -(-inputs // groups)
    in_a_row = torch.arange(inputs, device=codes.groups.device) // width
    if not torch.equal(codes.groups.sort().values, in_a_row):
        return None
    if not bool(((codes.zeros == codes.zeros.round()) & (codes.zeros >= 0) & (codes.zeros <= LARGEST_ZERO)).all()):
        return None
    if groups == 1:
        return LONGEST_STEP
    step = min(width & -width, LONGEST_STEP)
    return step if step >= SHORTEST_STEP else None


def pack_four_bits(codes: Codes, step: int) -> Packed:
    """Codes whose inputs are sorted by group."""
    (outputs, inputs), groups = codes.codes.shape, codes.scales.shape[1]
    more_outputs, more_inputs = -outputs % TILE, -inputs % step
    every = functional.pad(codes.codes, (0, more_inputs, 0, more_outputs))
    marks = functional.pad(_marks(codes), (0, 0, 0, more_outputs))
    steps = every.shape[1] // step
    return Packed(
        words=_words(every.view(-1, TILE, steps, step)), marks=marks.T.contiguous(), bits=4, outputs=outputs,
        inputs=inputs, padded=outputs + more_outputs, step=step,
        per_group=steps if groups == 1 else inputs // groups // step,
    )  # fmt: skip


def pack_eight_bits(matrix: Scaled) -> Packed:
    """The words are the codes in their new order; scales are copied, since torch's product wants them aligned."""
    outputs, inputs = matrix.codes.shape
    words = in_word_order(matrix.codes).view(torch.int32).flatten()
    # A step that divides the inputs needs no masks.
    step = min(inputs & -inputs, LONGEST_STEP)
    return Packed(
        words=words, marks=matrix.scales.float().clone(), bits=8, outputs=outputs, inputs=inputs, padded=outputs,
        step=step if step >= SHORTEST_STEP else LONGEST_STEP, per_group=1,
    )  # fmt: skip


def in_word_order(codes: Tensor) -> Tensor:
    """Eight-bit codes [rows, inputs] in the order of words."""
    rows, inputs = codes.shape
    parts = codes.view(torch.uint8).view(rows, inputs // 16, 2, 4, 2)
    return parts.permute(0, 1, 3, 4, 2).reshape(rows, inputs).view(codes.dtype)


def _words(codes: Tensor) -> Tensor:
    """[tiles, TILE, steps, step] -> [tiles * steps * TILE * step / 8] int32."""
    tiles, outputs, steps, step = codes.shape
    # An input's place in its 32 says the pair, the thread and the half.
    places = codes.transpose(1, 2).reshape(tiles, steps, outputs, step // 32, 4, 4, 2)
    words = torch.zeros((*places.shape[:4], 4), dtype=torch.int32, device=codes.device)
    for pair in range(4):
        for half in range(2):
            words |= places[..., pair, :, half].int() << (4 * pair + 16 * half)
    return words.flatten()


def _marks(codes: Codes) -> Tensor:
    """[outputs, groups] int32."""
    bits = codes.scales.contiguous().view(torch.int32)
    return ((bits + 128) & -256) | codes.zeros.int()
