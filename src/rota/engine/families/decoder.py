"""A Decoder has what the forward passes of all families share: products with adapters, attention, MLP, the head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.layer_cache import LayerCache
from rota.engine.lora.deferred import Output, closed
from rota.engine.lora.embed_head import EmbedHead
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.linear import Linear, Projection, tune_gemms
from rota.engine.model.rotary import rotary_table
from rota.engine.model.spec import ModelSpec
from rota.engine.ops.reference import HeadNorms, Operations
from rota.engine.parallel.group import ONE_RANK, RankGroup
from rota.engine.parallel.shard import PARTIAL_SITES
from rota.engine.step.device_step import DeviceStep, LoraBatch
from rota.engine.weights.load import LayerWeights, Weights

# ── open sites ──────────────────────────────────────────────────────────────────────────────────────────────────────
# The sites whose products stay open: the operation that follows adds the adapters' part.
#
#     gate_up    silu · up                       o, down    residual and norm (a program reads all of a row's B)
#     qkv        rotation and KV write
#
# On an H200 all four save 0.4 ms of a step of 64 with six adapters; of a step of 384, o and down save nothing
# (`benchmarks/open_sites.py`, decision 0023). In steps with a prompt gate_up alone stays open: beside a product of
# 2,048 tokens that is one time less of writing and reading 117 MB. Steps without adapters are not concerned.

# By site, the most tokens of a step that only decodes.
OPEN_SITES: Mapping[str, int] = {"gate_up": 512, "qkv": 512, "o": 128, "down": 128}
# In steps with a prompt, of any number of tokens.
OPEN_BESIDE_PROMPTS = frozenset({"gate_up"})

QUERY_NORM, KEY_NORM = "self_attn.q_norm", "self_attn.k_norm"


class Attention(Protocol):
    """Attention over the paged cache; keys and values of the step's own tokens are already written.

    query [tokens, heads, head_dim]; returns its shape and precision.
    `window` is a layer's: how many tokens a query sees at most, its own included; 0: all before it. What lies before
    every query's window is not read.
    """

    def decode(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor: ...

    def prefill(self, query: Tensor, cache: LayerCache, step: DeviceStep, window: int = 0) -> Tensor: ...


# (projection, x, layer, site, batch): a product at a site of a layer, plus what each token's adapter adds.
ProjectWithAdapters = Callable[[Projection, Tensor, int, str, LoraBatch], Output]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model computes with on the chosen device."""

    operations: Operations
    attention: Attention
    with_adapters: ProjectWithAdapters | None = None  # None: no step has adapters
    group: RankGroup = ONE_RANK  # ranks that each hold a part of the model
    embed_head: EmbedHead | None = None  # what adapters add to the embedding and to the head; None: nothing
    # By site: up to how many decodes the operation behind a product adds the adapters' part.
    open_sites: Mapping[str, int] = field(default_factory=lambda: OPEN_SITES)


class Decoder(ABC):
    """Weights and kernels of one model, tokens in and hidden states out; a family adds `forward`. It has no state."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.operations = kernels.operations
        self._attention = kernels.attention
        self._with_adapters = kernels.with_adapters
        self._open_sites = kernels.open_sites
        self.group = kernels.group
        self._embed_head = kernels.embed_head
        self._windows = [window or 0 for window in spec.windows] or [0] * spec.layers  # as attention takes it
        self._rotaries = self._tables(weights.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of hidden states and logits."""
        return self.weights.embedding.dtype

    def _tables(self, device: torch.device) -> list[Tensor]:
        """The rotary table of each layer; layers share what they have in common."""
        spec = self.spec
        whole = rotary_table(spec.rotary, spec.head_dim, spec.context_length, device)
        if spec.window_rotary is None:
            return [whole] * spec.layers
        local = rotary_table(spec.window_rotary, spec.head_dim, spec.context_length, device)
        return [local if window else whole for window in self._windows]

    def tune(self, rows: Sequence[int]) -> None:
        """Find the fastest products for these numbers of rows; before graphs are captured."""
        sites = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self.weights.layers]
        for alike in zip(*sites, strict=True):
            tune_gemms(alike, rows)

    @abstractmethod
    def forward(self, step: DeviceStep, cache: list[LayerCache]) -> Tensor:
        """[tokens, hidden size] after the last norm; writes the tokens' keys and values into the cache."""

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None, lora: LoraBatch | None = None) -> Tensor:
        """[n, this rank's tokens] in the model's precision, into `out` if given; pass only the rows that sample.

        `lora` says which adapter each of these rows has.
        """
        logits = self._head(hidden, out)
        if lora is not None and self._embed_head is not None:
            self._embed_head.head(logits, hidden, lora)
        return logits

    def _head(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        head = self.weights.head
        assert out is None or len(out) == len(hidden), "torch would allocate other memory for the logits"
        if out is None:
            return head(hidden)
        assert isinstance(head, Linear), "only graphs pass `out`, and on a GPU the head is a Linear"
        return torch.mm(hidden, head.weight.T, out=out)

    def embed(self, step: DeviceStep) -> Tensor:
        x = functional.embedding(step.token_ids, self.weights.embedding)
        if step.lora is not None and self._embed_head is not None:
            self._embed_head.embed(x, step.token_ids, step.lora)
        return x

    def project(self, projection: Projection, x: Tensor, step: DeviceStep, layer: int, site: str) -> Tensor:
        """A matrix product, plus what each token's adapter adds; summed over ranks where each computes a part."""
        y = closed(self._multiply(projection, x, step, layer, site))
        return self.group.sum(y) if site in PARTIAL_SITES else y

    def project_open(self, projection: Projection, x: Tensor, step: DeviceStep, layer: int, site: str) -> Output:
        """The same for an operation that adds the adapters' part itself, where that is faster."""
        if self._stays_open(step, site):
            return self._multiply(projection, x, step, layer, site)
        return self.project(projection, x, step, layer, site)

    def _multiply(self, projection: Projection, x: Tensor, step: DeviceStep, layer: int, site: str) -> Output:
        if step.lora is None:
            return projection(x)
        assert self._with_adapters is not None, "a step with adapters needs a bank"
        return self._with_adapters(projection, x, layer, site, step.lora)

    def _stays_open(self, step: DeviceStep, site: str) -> bool:
        if site in PARTIAL_SITES and self.group.size > 1:  # ranks add their parts first
            return False
        if step.prefill is not None:
            return site in OPEN_BESIDE_PROMPTS and site in self._open_sites
        return step.decodes <= self._open_sites.get(site, 0)

    def attend(
        self,
        qkv: Output,
        step: DeviceStep,
        cache: LayerCache,
        layer: int,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """[tokens, queries | keys | values] -> [tokens, heads * head_dim]; writes keys and values to the cache."""
        query = self.operations.rotate_and_store(qkv, self._rotaries[layer], step, cache, norms)
        attention, decodes, window = self._attention, step.decodes, self._windows[layer]
        if step.prefill is None:
            return attention.decode(query, cache, step, window).flatten(1)
        if decodes == 0:
            return attention.prefill(query, cache, step, window).flatten(1)
        decoded = attention.decode(query[:decodes], cache, step, window)
        prefilled = attention.prefill(query[decodes:], cache, step, window)
        return torch.cat((decoded, prefilled)).flatten(1)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.operations.rms_norm(x, weight, self.spec.norm_epsilon)

    def head_norms(self, norms: Mapping[str, Tensor]) -> HeadNorms | None:
        """Of a layer's norms those of each head; None if the family has none."""
        return (norms[QUERY_NORM], norms[KEY_NORM], self.spec.norm_epsilon) if QUERY_NORM in norms else None

    def feed_forward(self, layer: LayerWeights, x: Tensor, step: DeviceStep, index: int) -> Output:
        """The gated MLP with silu."""
        gate_up = self.project_open(layer.gate_up, x, step, index, "gate_up")
        return self.project_open(layer.down, self.operations.silu_multiply(gate_up), step, index, "down")


@dataclass(frozen=True, slots=True)
class Family:
    """What one file defines so that Rota serves the models of an architecture, by its name in config.json."""

    architecture: str
    read: Callable[[ConfigFile], Any]  # returns a ModelSpec, or the family's subclass
    make: Callable[[Any, Weights, Kernels], Decoder]  # takes that spec
