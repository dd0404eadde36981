"""The factors of an adapter at the model's ends, read and scaled as slots take them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rota.core.errors import AdapterError
from rota.engine.lora.base_ends import BaseEnds
from rota.engine.lora.files.end_trims import with_trims
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.names import EMBEDDING, HEAD
from rota.engine.lora.files.own_tokens import embedding_of_tokens, head_of_tokens
from rota.engine.lora.host import EndFactors
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import Cut

# Of a matrix's copy: how many rows are compared, and how far off rounding alone may bring them.
COMPARED_ROWS = 16
SAME = 0.01


def read_ends(
    folder: AdapterFolder, spec: ModelSpec, base: BaseEnds, dtype: torch.dtype, tokens: Cut
) -> tuple[EndFactors | None, EndFactors | None]:
    """What the adapter has at the embedding and at the head of this rank's tokens.

    Beside factors there PEFT saves the matrix below, and would load it over the model's.
    """
    _check_copy(folder, EMBEDDING, base.embedding_rows, Cut(0, 0, spec.vocab_size, spec.vocab_size))
    if base.has_plain_head:
        _check_copy(folder, HEAD, base.head_rows, tokens)
    embedding = read_embedding(folder, dtype) or embedding_of_tokens(folder, spec, base, dtype)
    head = read_head(folder, dtype, tokens) or head_of_tokens(folder, spec, base, dtype, tokens)
    return with_trims(folder, embedding, head, base, tokens)


def read_own(folder: AdapterFolder, module: str, dtype: torch.dtype, tokens: Cut) -> tuple[Tensor, ...] | None:
    """The rows of these tokens of a matrix of the adapter's own."""
    stored = folder.matrices.get(module)
    return None if stored is None else (stored.read(tokens).to(dtype).view(-1),)


def _check_copy(folder: AdapterFolder, module: str, rows_of: Callable[[list[int]], Tensor], tokens: Cut) -> None:
    """A few rows tell whether a copy is the model's own; it may be in another precision."""
    factors = folder.factors.get(module)
    if factors is None or factors.base is None:
        return
    places = range(0, tokens.end - tokens.first, max(1, (tokens.end - tokens.first) // COMPARED_ROWS))
    first, stored = tokens.first, factors.base
    copied = torch.cat([stored.read(Cut(0, first + place, first + place + 1, tokens.of)) for place in places]).float()
    own = rows_of(list(places))
    if not bool(((copied - own).norm() <= SAME * own.norm()).item()):
        raise AdapterError(
            f"{stored.file.path}: the tensor '{stored.name}' is not this model's own; the adapter was made for another "
            "model, or changed the whole matrix, which Rota does not serve."
        )


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
