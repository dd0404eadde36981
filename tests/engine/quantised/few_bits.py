"""Random matrices in few bits, as folders store them."""

from __future__ import annotations

import torch

from rota.engine.quantised.codes import Codes


def random_codes(
    outputs: int, inputs: int, group: int | None = 128, *, is_shuffled: bool = False, has_whole_zeros: bool = True
) -> Codes:
    """Groups of so many inputs, None: one for the whole row; shuffled: in the order of importance."""
    width = group or inputs
    groups = torch.arange(inputs) // width
    count = int(groups[-1]) + 1
    zeros = torch.randint(0, 16, (outputs, count)).float()
    return Codes(
        codes=torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8),
        scales=(torch.rand(outputs, count) + 0.5) / 64,
        zeros=zeros if has_whole_zeros else zeros + torch.rand(outputs, count) / 2,
        groups=groups[torch.randperm(inputs)] if is_shuffled else groups,
    )


def on_device(codes: Codes, device: str) -> Codes:
    return Codes(
        codes=codes.codes.to(device),
        scales=codes.scales.to(device),
        zeros=codes.zeros.to(device),
        groups=codes.groups.to(device),
    )
