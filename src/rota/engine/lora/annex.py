"""An annex is room for adapters' A below a matrix of the model: one product then gives x Wᵀ and x Aᵀ of every slot.

    x [tokens, inputs]  ·  [ W              ]ᵀ   =   [ x Wᵀ | x A₀ᵀ | x A₁ᵀ | … ]
                           [ A of slot 0    ]
                           [ A of slot 1    ]
                           [ …              ]

Where slots share pages, the pages lie there, one after the other.

A product of few rows takes as long as reading its matrix, and a small bank adds little to that. An annex saves a kernel
and a fork at every site. With six adapters of rank 16 a step of 64 tokens takes 6.81 instead of 7.03 ms, a step of 64
tokens and a prompt of 512 takes 17.4 instead of 18.6 (Llama-8B, H200, 2026-11-15). Columns of slots that a token does
not use are computed too, but never read.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from rota.engine.model.sites import SiteShape, site_shapes
from rota.engine.model.spec import ModelSpec

# What an H200 reads in a microsecond: about the cost of the shrink kernel at a site.
LARGEST_BYTES = 4 << 20
# Share of a matrix's own rows: for a prompt, more rows mean more time for multiplications.
LARGEST_SHARE = 1 / 8


def annexed_sites(spec: ModelSpec, places: int, rank: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The sites at which this many slots or pages of this rank are worth an annex."""

    def is_small(shape: SiteShape) -> bool:
        rows = _rows(shape, places, rank)
        return rows * shape.inputs * dtype.itemsize <= LARGEST_BYTES and rows <= LARGEST_SHARE * shape.outputs

    return tuple(shape.name for shape in site_shapes(spec) if is_small(shape))


def annex_rows(spec: ModelSpec, sites: Collection[str], places: int, rank: int) -> dict[str, int]:
    """The annex's rows at each of these sites."""
    return {shape.name: _rows(shape, places, rank) for shape in site_shapes(spec) if shape.name in sites}


def _rows(shape: SiteShape, places: int, rank: int) -> int:
    return places * len(shape.parts) * rank
