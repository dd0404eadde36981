"""Groups are a matrix in four bits: 32 adjacent weights in a row share a scale and a middle.

    weight = (code - 8) * scale + middle          code: 0 … 15

A matrix of eight bits is two such matrices side by side, since a code of eight bits is two codes of four bits:

    code = 16 * upper + lower                     upper: -8 … 7, lower: 0 … 15
    W x  = [ 16 * upper | lower ] [ x ]
                                  [ x ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rota.engine.quantised.codes import Codes

GROUP = 32
# The code that means a group's middle.
MIDDLE = 8
LARGEST_CODE = 15
LARGEST_CODE_OF_EIGHT_BITS = 127


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """A matrix [outputs, inputs] in four bits."""

    codes: Tensor  # [outputs, inputs / 2] uint8, two in a byte, the even input's in the lower half
    scales: Tensor  # [outputs, inputs / GROUP] float32
    middles: Tensor  # [outputs, inputs / GROUP] float32

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return 2 * self.codes.shape[1]

    def unpacked(self) -> Tensor:
        """[outputs, inputs] uint8, one code each."""
        return torch.stack((self.codes & LARGEST_CODE, self.codes >> 4), dim=2).flatten(1)

    def weights(self) -> Tensor:
        """[outputs, inputs] float32: the matrix itself."""
        codes = self.unpacked().view(self.outputs, -1, GROUP)
        return ((codes.float() - MIDDLE) * self.scales[:, :, None] + self.middles[:, :, None]).flatten(1)


def stacked(parts: Sequence[Groups]) -> Groups:
    """Matrices with the same inputs, one below the other."""
    if len(parts) == 1:
        return parts[0]
    return Groups(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.middles for part in parts]),
    )


def as_groups(codes: Codes) -> Groups | None:
    """Codes of any group size as groups of 32; None if 32 adjacent inputs are not of one group."""
    if codes.groups.numel() % GROUP:
        return None
    runs = codes.groups.view(-1, GROUP)
    if not torch.equal(runs, runs[:, :1].expand_as(runs)):
        return None
    scales, zeros = codes.scales[:, runs[:, 0]], codes.zeros[:, runs[:, 0]]
    return Groups(packed(codes.codes), scales, (MIDDLE - zeros) * scales)


def packed(codes: Tensor) -> Tensor:
    """Codes [outputs, inputs], two in a byte."""
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def in_four_bits(weight: Tensor) -> Groups:
    """The nearest codes of a matrix; a group's lowest and highest weights are exact codes."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    lowest, highest = grouped.amin(2), grouped.amax(2)
    # Scales are rounded for the products before weights are divided by them, so that no weight is rounded twice.
    scales = ((highest - lowest) / LARGEST_CODE).bfloat16().float()
    divisors = scales.where(scales > 0, 1.0)
    codes = ((grouped - lowest[:, :, None]) / divisors[:, :, None]).round_().clamp_(0, LARGEST_CODE)
    return Groups(packed(codes.flatten(1)), scales, lowest + MIDDLE * scales)


def in_eight_bits(weight: Tensor) -> Groups:
    """The nearest codes of eight bits, as two matrices of four side by side."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(2) / LARGEST_CODE_OF_EIGHT_BITS).bfloat16().float()
    divisors = scales.where(scales > 0, 1.0)
    most = LARGEST_CODE_OF_EIGHT_BITS
    codes = (grouped / divisors[:, :, None]).round_().clamp_(-most, most)
    return side_by_side(codes.flatten(1).to(torch.int8), scales)


def side_by_side(codes: Tensor, scales: Tensor) -> Groups:
    """A matrix of eight bits as Groups with twice the inputs: codes [outputs, inputs] int8, and the groups' scales."""
    upper, lower = (codes >> 4) + MIDDLE, codes & LARGEST_CODE
    return Groups(
        packed(torch.cat((upper, lower), 1)),
        torch.cat((16 * scales, scales), 1),
        torch.cat((torch.zeros_like(scales), MIDDLE * scales), 1),
    )


# ── rounding ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Rounding makes four-bit codes of plain weights, in groups of any size.


def in_codes(weight: Tensor, size: int) -> Codes:
    """The nearest codes in groups of `size` inputs, whose zeros are whole; the last group may be smaller."""
    groups = torch.arange(weight.shape[1], device=weight.device) // size
    exact = weight.float()
    lowest, highest = _extreme(exact, groups, "amin"), _extreme(exact, groups, "amax")
    scales = (highest - lowest) / LARGEST_CODE
    scales = scales.where(scales > 0, 1.0)
    zeros = (-lowest / scales).round_()
    codes = (exact / scales[:, groups] + zeros[:, groups]).round_().clamp_(0, LARGEST_CODE)
    return Codes(codes=codes.to(torch.uint8), scales=scales, zeros=zeros, groups=groups)


def _extreme(exact: Tensor, groups: Tensor, which: str) -> Tensor:
    """Of each group and zero, so that there is a code that means zero."""
    target = exact.new_zeros(exact.shape[0], int(groups[-1]) + 1)
    return target.scatter_reduce_(1, groups.expand_as(exact), exact, which)
