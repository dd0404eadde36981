"""What an adapter has besides the factors of its layers: gains and shifts, factors at the ends, matrices of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rota.core.errors import AdapterError
from rota.engine.lora.base import BaseEmbedHead, BaseMatrices
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.peft_config import EMBEDDING, HEAD
from rota.engine.lora.files.tensor_file import StoredTensor
from rota.engine.lora.gain_bias import empty_run, site_gain_bias
from rota.engine.lora.host import EmbedHeadFactors, HostAdapter, StackedSite
from rota.engine.model.sites import SiteShape, module_name, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import BY_INPUTS, WHOLE, Cut, Shard

# ── folding ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Folding turns DoRA's magnitudes and an adapter's biases into gains and biases: a gain and a shift for each output.
#
#     PEFT      y = bias' + m / |W + B A| · (x Wᵀ + x Aᵀ Bᵀ)  +  b        m, bias' and b are the adapter's own
#     here      y = gain · (x Wᵀ + bias + x Aᵀ Bᵀ) + shift              what the model and its factors give, scaled
#
# |W + B A|² of a row is |W|² + 2 (W Aᵀ) · B + B (A Aᵀ) Bᵀ: one product of the model with the rows of A, and no matrix
# of the model's size is made.


@dataclass(frozen=True, slots=True)
class Folding:
    """A folder that is open, the model below, and this rank's part of it."""

    folder: AdapterFolder
    base: BaseMatrices
    spec: ModelSpec  # of the whole model
    shard: Shard

    def gain_bias(self, sites: list[StackedSite]) -> Tensor:
        """The run of an adapter's gains and biases: [layers, 2 * outputs of all sites] float32."""
        shapes = site_shapes(self.shard.local(self.spec))
        run = empty_run(shapes, self.spec.layers)
        with self.base.alone():
            for layer, line in enumerate(run):
                for shape, site, target in zip(shapes, sites, site_gain_bias(line, shapes), strict=True):
                    self._fold(target, shape, layer, site)
        return run

    def _fold(self, target: Tensor, shape: SiteShape, layer: int, site: StackedSite) -> None:
        gain, shift = target
        if self.folder.config.is_dora and site.b.shape[1]:
            gain.copy_(self._gains(shape, layer, site.a[layer], site.b[layer]))
        shift.copy_(self._shifts(shape, layer, gain))

    def _gains(self, shape: SiteShape, layer: int, a: Tensor, b: Tensor) -> Tensor:
        """m / |W + B A| of every row; 1 for parts without factors. a: [parts, rank, inputs], b: [rank, outputs]."""
        device, rank = self.base.device, b.shape[0]
        a, b = a.to(device).float(), b.to(device).float()
        below = self.base.at[layer, shape.name]
        crossed, squares = below.products(a.flatten(0, 1)), below.squares
        gains = []
        for index, columns in enumerate(_columns(shape)):
            part_b, own = b[:, columns], crossed[index * rank : (index + 1) * rank, columns]
            magnitude = self._magnitude(layer, shape.parts[index][0])
            norm = norms(squares[columns], own, a[index] @ a[index].T, part_b).cpu()
            gains.append(torch.ones_like(norm) if magnitude is None else magnitude / norm)
        return torch.cat(gains)

    def _shifts(self, shape: SiteShape, layer: int, gain: Tensor) -> Tensor:
        """Only x Wᵀ + x Aᵀ Bᵀ is scaled: the model's own bias comes off scaled, and the adapter's is added."""
        own = self.base.at[layer, shape.name].bias().cpu()
        shift = own - gain * own
        for (part, _), columns in zip(shape.parts, _columns(shape), strict=True):
            module = module_name(layer, part)
            if part in BY_INPUTS and self.shard.rank > 0:
                continue  # behind a sum over ranks, only one of them adds biases
            if module in self.folder.biases:
                shift[columns] += self._read(self.folder.biases[module], part) - own[columns]
            factors = self.folder.factors.get(module)
            if factors is not None and factors.b_bias is not None:
                shift[columns] += self._read(factors.b_bias, part) * self.folder.config.scale_of(module)
        return shift

    def _magnitude(self, layer: int, part: str) -> Tensor | None:
        factors = self.folder.factors.get(module_name(layer, part))
        return None if factors is None or factors.magnitude is None else self._read(factors.magnitude, part)

    def _read(self, stored: StoredTensor, part: str) -> Tensor:
        cut, whole = self.shard.factor_cut(part, "b", self.spec), stored.read().float()  # cut as B is: by outputs
        return whole if cut is None else whole[cut.first : cut.end]


def norms(squares: Tensor, crossed: Tensor, gram: Tensor, b: Tensor) -> Tensor:
    """|W + B A| of every row, from |W|², W Aᵀ and A Aᵀ; crossed and b: [rank, outputs], gram: [rank, rank]."""
    return (squares + 2 * (crossed * b).sum(0) + (b * (gram @ b)).sum(0)).clamp_min(0.0).sqrt()


def _columns(shape: SiteShape) -> list[slice]:
    """The outputs of each part."""
    ends = torch.tensor(shape.widths).cumsum(0).tolist()
    return [slice(end - width, end) for end, width in zip(ends, shape.widths, strict=True)]


# ── own tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Rows of an adapter's own for some tokens are factors too: one rank for each token.
#
# embedding    A has a one where rank and token meet, B has the new row less the model's
# head         A has the new row less the model's, B has the ones


def embedding_of_tokens(
    folder: AdapterFolder, spec: ModelSpec, base: BaseEmbedHead, dtype: torch.dtype
) -> EmbedHeadFactors | None:
    if EMBEDDING not in folder.tokens:
        return None
    tokens = folder.config.own_tokens[EMBEDDING]
    rows = folder.tokens[EMBEDDING].read().float() - base.embedding_rows(tokens)
    return EmbedHeadFactors(_ones(tokens, spec.vocab_size, dtype).T.contiguous(), rows.to(dtype))


def head_of_tokens(
    folder: AdapterFolder, spec: ModelSpec, base: BaseEmbedHead, dtype: torch.dtype, cut: Cut
) -> EmbedHeadFactors | None:
    """Of this rank's tokens. Tied embeddings are one: new rows of the embedding are the head's too."""
    module = EMBEDDING if spec.has_tied_embeddings and HEAD not in folder.tokens else HEAD
    if module not in folder.tokens:
        return None
    tokens, rows = folder.config.own_tokens[module], folder.tokens[module].read().float()
    here = [place for place, token in enumerate(tokens) if cut.first <= token < cut.end]
    own = [tokens[place] - cut.first for place in here]
    return EmbedHeadFactors((rows[here] - base.head.rows(own)).to(dtype), _ones(own, cut.end - cut.first, dtype))


def _ones(tokens: tuple[int, ...] | list[int], vocabulary: int, dtype: torch.dtype) -> Tensor:
    """[ranks, vocabulary]"""
    ones = torch.zeros(len(tokens), vocabulary, dtype=dtype)
    ones[range(len(tokens)), list(tokens)] = 1.0
    return ones


# ── end gains and biases ────────────────────────────────────────────────────────────────────────────────────────────
# Magnitudes and biases of an adapter's ends become gains and biases there, as they do in the layers, above.


def with_gain_bias(
    folder: AdapterFolder,
    embedding: EmbedHeadFactors | None,
    head: EmbedHeadFactors | None,
    base: BaseEmbedHead,
    tokens: Cut,
) -> tuple[EmbedHeadFactors | None, EmbedHeadFactors | None]:
    """The same factors; those of a DoRA, or with a bias of B, have gains and biases of this rank's outputs."""
    if embedding is not None and (magnitude := _vector(folder, EMBEDDING, "magnitude")) is not None:
        squares, crossed = base.embedding_against(embedding.a)
        a, b = embedding.a.float(), embedding.b.float()
        gain = magnitude / norms(squares, crossed, a.T @ a, b)
        embedding = replace(embedding, gain_bias=torch.stack([gain, torch.zeros_like(gain)]))
    if head is None:
        return embedding, None
    gain, shift = torch.ones(head.b.shape[1]), torch.zeros(head.b.shape[1])
    if (magnitude := _vector(folder, HEAD, "magnitude")) is not None:
        squares, crossed = base.head.squares.cpu(), base.head.products(head.a).cpu()
        a = head.a.float()
        gain = magnitude[tokens.first : tokens.end] / norms(squares, crossed, a @ a.T, head.b.float())
    elif (bias := _vector(folder, HEAD, "b_bias")) is not None:
        shift = bias[tokens.first : tokens.end] * folder.config.scale_of(HEAD)
    else:
        return embedding, head
    return embedding, replace(head, gain_bias=torch.stack([gain, shift]))


def _vector(folder: AdapterFolder, module: str, kind: str) -> Tensor | None:
    stored = getattr(folder.factors.get(module), kind, None)
    return None if stored is None else stored.read().float()


# ── end factors ─────────────────────────────────────────────────────────────────────────────────────────────────────
# The factors of an adapter at the model's ends, read and scaled as slots take them.

# Of a matrix's copy: how many rows are compared, and how far off rounding alone may bring them.
COMPARED_ROWS = 16
SAME = 0.01


def read_embed_head(
    folder: AdapterFolder, spec: ModelSpec, base: BaseEmbedHead, dtype: torch.dtype, tokens: Cut
) -> tuple[EmbedHeadFactors | None, EmbedHeadFactors | None]:
    """What the adapter has at the embedding and at the head of this rank's tokens.

    Beside factors there PEFT saves the matrix below, and would load it over the model's.
    """
    _check_copy(folder, EMBEDDING, base.embedding_rows, WHOLE.tokens(spec.vocab_size))
    if base.head.is_plain:
        _check_copy(folder, HEAD, base.head.rows, tokens)
    embedding = read_factors(folder, EMBEDDING, dtype, None) or embedding_of_tokens(folder, spec, base, dtype)
    head = read_factors(folder, HEAD, dtype, tokens) or head_of_tokens(folder, spec, base, dtype, tokens)
    return with_gain_bias(folder, embedding, head, base, tokens)


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


def read_factors(
    folder: AdapterFolder, module: str, dtype: torch.dtype, outputs: Cut | None
) -> EmbedHeadFactors | None:
    """With these outputs. Of an embedding PEFT looks a token's column of A up, and a slot its row."""
    factors = folder.factors.get(module)
    if factors is None or factors.a is None or factors.b is None:
        return None
    a = factors.a.read().T if module == EMBEDDING else factors.a.read()
    b = factors.b.read(outputs).float().mul_(folder.config.scale_of(module))
    return EmbedHeadFactors(a.to(dtype).contiguous(), b.T.to(dtype).contiguous())


# ── extras ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# All of that, of an adapter whose sites are filled.


def with_extras(
    adapter: HostAdapter,
    sites: list[StackedSite],
    folder: AdapterFolder,
    spec: ModelSpec,
    dtype: torch.dtype,
    shard: Shard,
    base: BaseMatrices | None,
    embed_head: BaseEmbedHead | None,
) -> HostAdapter:
    """The adapter with all that its folder has besides the factors of layers, which fill the sites. Blocks on the disk.

    `spec` is the whole model's. Without a `base` slots have no gains and biases.
    """
    config, gain_bias, embedding, head = folder.config, None, None, None
    if base is not None and (config.is_dora or config.has_factor_biases or folder.biases):
        gain_bias = Folding(folder, base, spec, shard).gain_bias(sites)
    everything, own = WHOLE.tokens(spec.vocab_size), shard.tokens(spec.vocab_size)
    if embed_head is not None:
        with nullcontext() if base is None else base.alone():
            embedding, head = read_embed_head(folder, spec, embed_head, dtype, own)
    return replace(
        adapter,
        gain_bias=gain_bias,
        embedding=embedding,
        head=head,
        own_embedding=read_own(folder, EMBEDDING, dtype, everything),
        own_head=read_own(folder, HEAD, dtype, own),
    )
