"""Rounding makes four-bit codes of plain weights, in groups of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.quantised.codes import Codes
from rota.engine.quantised.groups import LARGEST_CODE


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
