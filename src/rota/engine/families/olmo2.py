"""OLMo 2: a norm after each half of a layer instead of before it, one over all queries and one over all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.families.decoder import KEY_NORM, QUERY_NORM, Decoder, Family
from rota.engine.layer_cache import LayerCache
from rota.engine.lora.deferred import closed
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec, common_fields, only_silu
from rota.engine.step.device_step import DeviceStep
from rota.engine.weights.load import LayerWeights

ARCHITECTURE = "Olmo2ForCausalLM"
ATTENTION_NORM, MLP_NORM = "post_attention_layernorm", "post_feedforward_layernorm"


def read(config: ConfigFile) -> ModelSpec:
    only_silu(config)
    fields = common_fields(config, ARCHITECTURE)
    hidden_size, head_dim = fields["hidden_size"], fields["head_dim"]
    return ModelSpec(
        **fields,
        layer_norms=(
            (ATTENTION_NORM, hidden_size),
            (MLP_NORM, hidden_size),
            (QUERY_NORM, fields["heads"] * head_dim),
            (KEY_NORM, fields["kv_heads"] * head_dim),
        ),
        norms_all_heads=True,
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
    )


class Olmo2Model(Decoder):
    @torch.inference_mode()
    def forward(self, step: DeviceStep, cache: list[LayerCache]) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values into `cache`."""
        x = self.embed(step)
        for index, (layer, layer_cache) in enumerate(zip(self.weights.layers, cache, strict=True)):
            qkv = self._norm_queries_and_keys(layer, self.project(layer.qkv, x, step, index, "qkv"))
            attended = self.project(layer.output, self.attend(qkv, step, layer_cache, index), step, index, "o")
            x = x + self.norm(attended, layer.norms[ATTENTION_NORM])
            x = x + self.norm(closed(self.feed_forward(layer, x, step, index)), layer.norms[MLP_NORM])
        return self.norm(x, self.weights.norm)

    def _norm_queries_and_keys(self, layer: LayerWeights, qkv: Tensor) -> Tensor:
        queries, keys = len(layer.norms[QUERY_NORM]), len(layer.norms[KEY_NORM])
        query, key, value = qkv.split([queries, keys, keys], dim=1)
        if self.group.size > 1:
            normed = self._norm_over_ranks(query, key, layer.norms[QUERY_NORM], layer.norms[KEY_NORM])
            return torch.cat((*normed, value), dim=1)
        return torch.cat(
            (self.norm(query, layer.norms[QUERY_NORM]), self.norm(key, layer.norms[KEY_NORM]), value), dim=1
        )

    def _norm_over_ranks(
        self, query: Tensor, key: Tensor, query_norm: Tensor, key_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Each rank has some of the heads. A third, small sum in each layer gives the squares of all heads."""
        queries, keys, copies = query.float(), key.float(), self.spec.kv_copies
        squares = torch.stack((queries.square().sum(1), keys.square().sum(1) / copies), dim=1)
        total = self.group.sum(squares)
        return (
            self._scaled(queries, total[:, :1], query_norm, self.group.size * query.shape[1]).to(query.dtype),
            self._scaled(keys, total[:, 1:], key_norm, self.group.size * key.shape[1] // copies).to(key.dtype),
        )

    def _scaled(self, x: Tensor, squares: Tensor, weight: Tensor, width: int) -> Tensor:
        return x * (squares / width + self.spec.norm_epsilon).rsqrt() * weight


FAMILY = Family(ARCHITECTURE, read, Olmo2Model)
