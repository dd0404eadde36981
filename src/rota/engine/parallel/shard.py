"""A shard is one rank's part of a model: some of its heads, of its MLP's columns and of its vocabulary.

    cut by outputs    q k v gate up, head      every rank reads all of x, and computes some of the outputs
    cut by inputs     o down                   every rank reads its own outputs, and computes a part of a sum
    whole             embedding, norms         (OLMo 2 norms all queries at once: cut like the queries)

An adapter is cut in the same way. Where outputs are cut, A is whole and B is cut. Where inputs are cut, A is cut and B
is whole: x Aᵀ is then a part of a sum, and so is what B makes of it. So the sum over ranks that follows o and down
covers the adapters too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rota.core.errors import ConfigError
from rota.engine.model.spec import ModelSpec

# The two sites whose outputs are parts of sums, and the matrices there.
PARTIAL_SITES = ("o", "down")
BY_INPUTS = ("o_proj", "down_proj")
# What is as long as all heads, all KV heads, and the MLP's columns.
QUERIES, KEYS_AND_VALUES = ("q_proj", "o_proj", "q_norm"), ("k_proj", "v_proj", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
HEAD = "lm_head"
# Tokens: a rank's part of the head begins where every kernel can read at full width.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """The stretch [first, end) of a tensor's rows (axis 0) or columns (axis 1), of which there are `of`."""

    axis: Literal[0, 1]
    first: int
    end: int
    of: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`; the only rank of one holds everything."""

    rank: int = 0
    size: int = 1

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The spec of this rank's part: what sites, bank, KV cache and kernels are made for."""
        if self.size == 1:
            return spec
        if not _divides(self.size, spec):
            raise ConfigError(_refusal(self.size, spec))
        return replace(
            spec,
            heads=spec.heads // self.size,
            kv_heads=max(1, spec.kv_heads // self.size),
            kv_copies=max(1, self.size // spec.kv_heads),
            intermediate_size=spec.intermediate_size // self.size,
            layer_norms=tuple((name, self._norm_width(name, width, spec)) for name, width in spec.layer_norms),
        )

    def holds(self, name: str) -> bool:
        """Does this rank add a tensor? The bias behind a sum is added once, by rank 0."""
        return self.rank == 0 or not (name.endswith(".bias") and _part(name) in BY_INPUTS)

    def cut(self, name: str, spec: ModelSpec) -> Cut | None:
        """Which stretch of a tensor of the whole model is this rank's; None: all of it."""
        part, is_bias = _part(name), name.endswith(".bias")
        if self.size == 1 or (is_bias and part in BY_INPUTS):
            return None
        if part == HEAD:
            return self.tokens(spec.vocab_size)
        if part in ("q_norm", "k_norm") and not spec.norms_all_heads:
            return None
        return self._stretch(part, spec)

    def factor_cut(self, part: str, letter: Literal["a", "b"], spec: ModelSpec) -> Cut | None:
        """Which stretch of an adapter's factor is this rank's: A is [rank, inputs], B is [outputs, rank]."""
        is_cut = letter == ("a" if part in BY_INPUTS else "b")
        return self._stretch(part, spec) if is_cut and self.size > 1 else None

    def tokens(self, vocabulary: int) -> Cut:
        """The tokens whose logits this rank computes; the last rank may have fewer than the others."""
        step = ALIGNMENT if vocabulary >= ALIGNMENT * self.size**2 else 1
        portion = -(-vocabulary // (self.size * step)) * step
        first = self.rank * portion
        return Cut(0, first, min(vocabulary, first + portion), vocabulary)

    def _stretch(self, part: str, spec: ModelSpec) -> Cut | None:
        if part in QUERIES:
            units, width = spec.heads, spec.head_dim
        elif part in KEYS_AND_VALUES:
            units, width = spec.kv_heads, spec.head_dim
        elif part in MLP:
            units, width = spec.intermediate_size, 1
        else:
            return None
        # Where there are fewer KV heads than ranks, neighbours have copies of one.
        first, count = self.rank * units // self.size, max(1, units // self.size)
        return Cut(1 if part in BY_INPUTS else 0, first * width, (first + count) * width, units * width)

    def _norm_width(self, name: str, width: int, spec: ModelSpec) -> int:
        cut = self.cut(f"{name}.weight", spec)
        return width if cut is None else cut.end - cut.first


WHOLE = Shard()


def sizes_for(spec: ModelSpec) -> Iterator[int]:
    """How many ranks may share a model."""
    return (size for size in range(1, spec.heads + 1) if _divides(size, spec))


def _divides(size: int, spec: ModelSpec) -> bool:
    shares_kv = spec.kv_heads % size == 0 or size % spec.kv_heads == 0
    is_even = spec.heads % size == 0 and spec.intermediate_size % size == 0
    return is_even and shares_kv and spec.vocab_size >= size**2


def _refusal(size: int, spec: ModelSpec) -> str:
    return (
        f"tensor_parallel_size is {size}, but {size} ranks cannot share this model evenly: it has {spec.heads} heads, "
        f"{spec.kv_heads} key-value heads and an intermediate size of {spec.intermediate_size}. Sizes that can: "
        f"{', '.join(map(str, sizes_for(spec)))}."
    )


def _part(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> q_proj"""
    return name.rsplit(".", 2)[-2]
