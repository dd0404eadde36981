"""Rows of an adapter's own for some tokens are factors too: one rank for each token.

embedding    A has a one where rank and token meet, B has the new row less the model's
head         A has the new row less the model's, B has the ones
"""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.lora.base_ends import BaseEnds
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.names import EMBEDDING, HEAD
from rota.engine.lora.host import EndFactors
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import Cut


def embedding_of_tokens(
    folder: AdapterFolder, spec: ModelSpec, base: BaseEnds, dtype: torch.dtype
) -> EndFactors | None:
    if EMBEDDING not in folder.tokens:
        return None
    tokens = folder.config.own_tokens[EMBEDDING]
    rows = folder.tokens[EMBEDDING].read().float() - base.embedding_rows(tokens)
    return EndFactors(_ones(tokens, spec.vocab_size, dtype).T.contiguous(), rows.to(dtype))


def head_of_tokens(
    folder: AdapterFolder, spec: ModelSpec, base: BaseEnds, dtype: torch.dtype, cut: Cut
) -> EndFactors | None:
    """Of this rank's tokens. Tied embeddings are one: new rows of the embedding are the head's too."""
    module = EMBEDDING if spec.has_tied_embeddings and HEAD not in folder.tokens else HEAD
    if module not in folder.tokens:
        return None
    tokens, rows = folder.config.own_tokens[module], folder.tokens[module].read().float()
    here = [place for place, token in enumerate(tokens) if cut.first <= token < cut.end]
    own = [tokens[place] - cut.first for place in here]
    return EndFactors((rows[here] - base.head_rows(own)).to(dtype), _ones(own, cut.end - cut.first, dtype))


def _ones(tokens: tuple[int, ...] | list[int], vocabulary: int, dtype: torch.dtype) -> Tensor:
    """[ranks, vocabulary]"""
    ones = torch.zeros(len(tokens), vocabulary, dtype=dtype)
    ones[range(len(tokens)), list(tokens)] = 1.0
    return ones
