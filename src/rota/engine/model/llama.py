"""Llama is the forward pass of the whole family: what differs between its members is in the spec and the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.lora.adapters import Adapters
from rota.engine.model.linear import Linear, Projection, learn_ways
from rota.engine.model.rotary import rotary_table
from rota.engine.model.spec import ModelSpec
from rota.engine.step import Attention, DeviceStep, Operations
from rota.engine.weights import LayerWeights, Weights


class Llama:
    """A model without state: weights in, hidden states out, keys and values written to the cache it is given."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        operations: Operations,
        attention: Attention,
        adapters: Adapters | None = None,
    ) -> None:
        self._weights = weights
        self._adapters = adapters
        self._operations = operations
        self._attention = attention
        self._epsilon = spec.norm_epsilon
        self._rotary = rotary_table(spec.rotary, spec.head_dim, spec.context_length, weights.embedding.device)
        # A layer ends with the norm its successor begins with: adding and norming are one operation.
        self._next_norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]

    def learn(self, rows: Sequence[int]) -> None:
        """Find out how products of so many rows are quickest; before anything is captured."""
        layers = self._weights.layers
        learn_ways([layer.qkv for layer in layers], rows)
        learn_ways([layer.output for layer in layers], rows)
        learn_ways([layer.gate_up for layer in layers], rows)
        learn_ways([layer.down for layer in layers], rows)

    @torch.inference_mode()
    def forward(self, step: DeviceStep, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values into `cache`."""
        operations, layers = self._operations, self._weights.layers
        residual = functional.embedding(step.token_ids, self._weights.embedding)
        x = operations.rms_norm(residual, layers[0].attention_norm, self._epsilon)
        for index, (layer, (keys, values), next_norm) in enumerate(zip(layers, cache, self._next_norms, strict=True)):
            x = self._attend(layer, x, step, keys, values, index)
            x, residual = operations.add_rms_norm(x, residual, layer.mlp_norm, self._epsilon)
            x = operations.silu_multiply(self._project(layer.gate_up, x, step, index, "gate_up"))
            x = self._project(layer.down, x, step, index, "down")
            x, residual = operations.add_rms_norm(x, residual, next_norm, self._epsilon)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, vocabulary] in the model's precision, into `out` if given; ask only for the rows that sample."""
        head = self._weights.head
        assert out is None or len(out) == len(hidden), "torch would put the logits elsewhere"
        if out is None:
            return head(hidden)
        assert isinstance(head, Linear), "graphs keep logits, and they are a GPU's"
        return torch.mm(hidden, head.weight.T, out=out)

    def _project(self, projection: Projection, x: Tensor, step: DeviceStep, layer: int, site: str) -> Tensor:
        """A matrix product, and what each token's adapter adds to it."""
        if step.lora is None:
            return projection(x)
        assert self._adapters is not None, "a step with adapters needs a bank"
        return self._adapters.project(projection, x, layer, site, step.lora)

    def _attend(
        self, layer: LayerWeights, x: Tensor, step: DeviceStep, keys: Tensor, values: Tensor, index: int
    ) -> Tensor:
        norms = None if layer.head_norms is None else (*layer.head_norms, self._epsilon)
        qkv = self._project(layer.qkv, x, step, index, "qkv")
        query = self._operations.rotate_and_store(qkv, self._rotary, step, keys, values, norms)
        attention, decodes = self._attention, step.decodes
        if step.prefill is None:
            attended = attention.decode(query, keys, values, step)
        elif decodes == 0:
            attended = attention.prefill(query, keys, values, step)
        else:
            attended = torch.cat(
                (
                    attention.decode(query[:decodes], keys, values, step),
                    attention.prefill(query[decodes:], keys, values, step),
                )
            )
        return self._project(layer.output, attended.flatten(1), step, index, "o")
