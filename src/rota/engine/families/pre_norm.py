"""The forward pass of most families: a norm before each half of a layer, then the half's output is added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rota.engine.families.decoder import Decoder, Kernels
from rota.engine.layer_cache import LayerCache
from rota.engine.lora.deferred import Output
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu
from rota.engine.step.device_step import DeviceStep
from rota.engine.weights.load import Weights

ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"


def pre_norm_fields(config: ConfigFile, architecture: str) -> dict[str, Any]:
    """What the families that compute so read alike."""
    only_silu(config)
    fields = common_fields(config, architecture)
    return {**fields, "layer_norms": ((ATTENTION_NORM, fields["hidden_size"]), (MLP_NORM, fields["hidden_size"]))}


class PreNormModel(Decoder):
    """Llama's order of norms, also Mistral's, Qwen's and Granite's."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels) -> None:
        super().__init__(spec, weights, kernels)
        # A layer ends with the first norm of the next layer: adding and norming are one operation.
        self._next_norms = [layer.norms[ATTENTION_NORM] for layer in weights.layers[1:]] + [weights.norm]

    @torch.inference_mode()
    def forward(self, step: DeviceStep, cache: list[LayerCache]) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values into `cache`."""
        layers = self.weights.layers
        residual = self.embed(step)
        x = self.norm(residual, layers[0].norms[ATTENTION_NORM])
        for index, (layer, layer_cache, next_norm) in enumerate(zip(layers, cache, self._next_norms, strict=True)):
            qkv = self.project_open(layer.qkv, x, step, index, "qkv")
            attended = self.attend(qkv, step, layer_cache, index, self.head_norms(layer.norms))
            added = self.project_open(layer.output, attended, step, index, "o")
            x, residual = self.add_norm(added, residual, layer.norms[MLP_NORM])
            added = self.feed_forward(layer, x, step, index)
            x, residual = self.add_norm(added, residual, next_norm)
        return x

    def add_norm(self, x: Output, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may reuse both inputs' storage."""
        return self.operations.add_rms_norm(x, residual, norm, self.spec.norm_epsilon)
