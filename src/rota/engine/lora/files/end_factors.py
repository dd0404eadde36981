"""The factors of an adapter at the model's ends, read and scaled as slots take them."""

from __future__ import annotations

import torch

from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.names import EMBEDDING, HEAD
from rota.engine.lora.host import EndFactors
from rota.engine.parallel.shard import Cut


def read_embedding(folder: AdapterFolder, dtype: torch.dtype) -> EndFactors | None:
    """PEFT looks a token's column of A up, and a slot its row."""
    factors = folder.factors.get(EMBEDDING)
    if factors is None or factors.a is None or factors.b is None:
        return None
    b = factors.b.read().float().mul_(folder.config.scale_of(EMBEDDING))
    return EndFactors(factors.a.read().T.to(dtype).contiguous(), b.T.to(dtype).contiguous())


def read_head(folder: AdapterFolder, dtype: torch.dtype, tokens: Cut) -> EndFactors | None:
    """With the outputs of these tokens."""
    factors = folder.factors.get(HEAD)
    if factors is None or factors.a is None or factors.b is None:
        return None
    b = factors.b.read(tokens).float().mul_(folder.config.scale_of(HEAD))
    return EndFactors(factors.a.read().to(dtype), b.T.to(dtype).contiguous())
