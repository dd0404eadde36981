"""Magnitudes and biases of an adapter's ends become trims there, as they do in the layers (folding.py)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rota.engine.lora.base_ends import BaseEnds
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.folding import norms
from rota.engine.lora.files.names import EMBEDDING, HEAD
from rota.engine.lora.host import EndFactors
from rota.engine.parallel.shard import Cut


def with_trims(
    folder: AdapterFolder, embedding: EndFactors | None, head: EndFactors | None, base: BaseEnds, tokens: Cut
) -> tuple[EndFactors | None, EndFactors | None]:
    """The same factors; those of a DoRA, or with a bias of B, have trims of this rank's outputs."""
    if embedding is not None and (magnitude := _vector(folder, EMBEDDING, "magnitude")) is not None:
        squares, crossed = base.embedding_against(embedding.a)
        a, b = embedding.a.float(), embedding.b.float()
        gain = magnitude / norms(squares, crossed, a.T @ a, b)
        embedding = replace(embedding, trims=torch.stack([gain, torch.zeros_like(gain)]))
    if head is None:
        return embedding, None
    gain, shift = torch.ones(head.b.shape[1]), torch.zeros(head.b.shape[1])
    if (magnitude := _vector(folder, HEAD, "magnitude")) is not None:
        squares, crossed = base.head_against(head.a)
        a = head.a.float()
        gain = magnitude[tokens.first : tokens.end] / norms(squares, crossed, a @ a.T, head.b.float())
    elif (bias := _vector(folder, HEAD, "b_bias")) is not None:
        shift = bias[tokens.first : tokens.end] * folder.config.scale_of(HEAD)
    else:
        return embedding, head
    return embedding, replace(head, trims=torch.stack([gain, shift]))


def _vector(folder: AdapterFolder, module: str, kind: str) -> Tensor | None:
    stored = getattr(folder.factors.get(module), kind, None)
    return None if stored is None else stored.read().float()
