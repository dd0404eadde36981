"""Products by a matrix in four bits: torch's for ARM and for x86, and the references of their tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rota.engine.quantised.groups import GROUP, Groups

Product = Callable[[Tensor], Tensor]


class DynamicProduct:
    """ARM's product: rounds each row of x to eight bits, then multiplies integers.

    The product has scales but no middles. A second, small product adds the middles: a group's middle times the sum of x
    over that group.
    """

    def __init__(self, groups: Groups) -> None:
        self._inputs, self._outputs = groups.inputs, groups.outputs
        # KleidiAI takes scales in bfloat16; with other scales torch computes slowly, one number at a time.
        scales = groups.scales.bfloat16()
        self._weight = torch.ops.aten._dyn_quant_pack_4bit_weight(
            groups.codes, scales, None, GROUP, groups.inputs, groups.outputs
        )
        # Groups without middles come first, if there are any; they add zero.
        self._first = int((groups.middles != 0).any(0).int().argmax())
        self._middles = groups.middles[:, self._first :].T.contiguous()

    @property
    def size_bytes(self) -> int:
        return self._weight.nbytes + self._middles.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        exact = x.float()
        y: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(exact, self._weight, GROUP, self._inputs, self._outputs)
        sums = exact.unflatten(1, (-1, GROUP))[:, self._first :].sum(2)
        return y.addmm_(sums, self._middles).to(x.dtype)


class WeightOnlyProduct:
    """x86's product: multiplies x in bfloat16 by weights that it unpacks meanwhile; fast for few rows of x."""

    def __init__(self, groups: Groups) -> None:
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.unpacked().int(), 1)
        pairs = torch.stack((groups.scales.T, groups.middles.T), dim=2)
        self._scales_and_middles = pairs.bfloat16().contiguous()

    @property
    def size_bytes(self) -> int:
        return self._weight.nbytes + self._scales_and_middles.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self._weight, GROUP, self._scales_and_middles
        )
        return y.to(x.dtype)


def dynamic_reference(x: Tensor, groups: Groups) -> Tensor:
    """What `DynamicProduct` computes, in plain torch."""
    exact = x.float()
    lowest, highest = exact.amin(1, keepdim=True).clamp(max=0.0), exact.amax(1, keepdim=True).clamp(min=0.0)
    step = (highest - lowest) / 255
    step = step.where(step > 0, 1.0)
    # The code of zero, by the more exact of two formulas.
    from_below, from_above = -128 - lowest / step, 127 - highest / step
    is_nearer_below = (-128 + lowest / step) + (127 + highest / step) > 0
    zero_code = from_below.where(is_nearer_below, from_above).clamp(-128, 127).round()
    rounded = ((exact / step).round() + zero_code).clamp(-128, 127)
    scaled = Groups(groups.codes, groups.scales.bfloat16().float(), torch.zeros_like(groups.middles))
    sums = exact.unflatten(1, (-1, GROUP)).sum(2)
    return ((rounded - zero_code) * step @ scaled.weights().T + sums @ groups.middles.T).to(x.dtype)


def weight_only_reference(x: Tensor, groups: Groups) -> Tensor:
    """What `WeightOnlyProduct` computes, in plain torch."""
    rounded = Groups(groups.codes, groups.scales.bfloat16().float(), groups.middles.bfloat16().float())
    return (x.bfloat16().float() @ rounded.weights().T).bfloat16().to(x.dtype)
