"""Granite 3: Llama with four multipliers, at the embedding, the scores, the residual and the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rota.engine.families.decoder import Family
from rota.engine.families.pre_norm import PreNormModel, pre_norm_fields
from rota.engine.lora.deferred import Output, closed
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec
from rota.engine.step.device_step import DeviceStep, LoraBatch

ARCHITECTURE = "GraniteForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteSpec(ModelSpec):
    """The multiplier of the scores is `attention_scale`."""

    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float


def read(config: ConfigFile) -> GraniteSpec:
    fields = pre_norm_fields(config, ARCHITECTURE)
    fields["attention_scale"] = config.number("attention_multiplier", 1.0)
    return GraniteSpec(
        **fields,
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
        has_mlp_bias=config.flag("mlp_bias"),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )


class GraniteModel(PreNormModel):
    spec: GraniteSpec

    def embed(self, step: DeviceStep) -> Tensor:
        return super().embed(step) * self.spec.embedding_multiplier

    def add_norm(self, x: Output, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return super().add_norm(closed(x) * self.spec.residual_multiplier, residual, norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None, lora: LoraBatch | None = None) -> Tensor:
        return super().logits(hidden, out, lora).div_(self.spec.logits_divisor)


FAMILY = Family(ARCHITECTURE, read, GraniteModel)
