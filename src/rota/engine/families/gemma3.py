"""Gemma 3 text: windows in most layers, a norm before and behind each half, and its own rotary base in a window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rota.core.errors import ModelError
from rota.engine.families.decoder import KEY_NORM, QUERY_NORM, Decoder, Family, Kernels
from rota.engine.layer_cache import LayerCache
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.rotary import RotarySpec, read_rotary
from rota.engine.model.spec import FULL, SLIDING, ModelSpec, common_fields, read_windows
from rota.engine.step.device_step import DeviceStep, LoraBatch
from rota.engine.weights.load import LayerWeights, Weights

ARCHITECTURE = "Gemma3ForCausalLM"
ATTENTION_NORM, ATTENDED_NORM = "input_layernorm", "post_attention_layernorm"
MLP_NORM, MLP_OUTPUT_NORM = "pre_feedforward_layernorm", "post_feedforward_layernorm"
# Every sixth layer sees all tokens, where config.json does not say which.
PATTERN = 6
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Spec(ModelSpec):
    """Logits may be capped softly: cap · tanh(logits / cap)."""

    logits_cap: float | None


def read(config: ConfigFile) -> Gemma3Spec:
    _refuse_what_is_not_computed(config)
    rotary, local_rotary = _read_rotaries(config)
    fields = common_fields(config, ARCHITECTURE, rotary)
    pattern = config.whole("sliding_window_pattern", config.whole("_sliding_window_pattern", PATTERN))
    fields["attention_scale"] = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    fields["has_tied_embeddings"] = config.flag("tie_word_embeddings", True)
    fields["windows"] = read_windows(config, fields["layers"], lambda layer: (layer + 1) % pattern != 0)
    return Gemma3Spec(
        **fields,
        layer_norms=(
            *((name, fields["hidden_size"]) for name in (ATTENTION_NORM, ATTENDED_NORM, MLP_NORM, MLP_OUTPUT_NORM)),
            *((name, fields["head_dim"]) for name in (QUERY_NORM, KEY_NORM)),
        ),
        has_qkv_bias=config.flag("attention_bias"),
        has_output_bias=config.flag("attention_bias"),
        window_rotary=local_rotary,
        logits_cap=config.number("final_logit_softcapping") if config.get("final_logit_softcapping") else None,
    )


def _refuse_what_is_not_computed(config: ConfigFile) -> None:
    activation = config.get("hidden_activation", config.get("hidden_act", "gelu_pytorch_tanh"))
    if activation != "gelu_pytorch_tanh":
        raise ModelError(f"{config.path} asks for the activation '{activation}'; Gemma 3 has 'gelu_pytorch_tanh'.")
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise ModelError(f"{config.path} sets '{name}', which Rota does not compute for Gemma 3.")


def _read_rotaries(config: ConfigFile) -> tuple[RotarySpec, RotarySpec]:
    """Of layers that see all tokens, and of layers with a window; transformers 5 writes a section for each."""
    sections = config.section("rope_parameters")
    if FULL in sections or SLIDING in sections:
        whole, local = ({**config.values, "rope_parameters": sections.get(kind) or {}} for kind in (FULL, SLIDING))
    else:
        whole, local = config.values, {**config.values, "rope_scaling": None}
        local["rope_theta"] = config.number("rope_local_base_freq", LOCAL_THETA)
    return (
        read_rotary(ConfigFile(config.path, {"rope_theta": GLOBAL_THETA, **whole})),
        read_rotary(ConfigFile(config.path, {"rope_theta": LOCAL_THETA, **local})),
    )


class Gemma3Model(Decoder):
    spec: Gemma3Spec

    def __init__(self, spec: Gemma3Spec, weights: Weights, kernels: Kernels) -> None:
        super().__init__(spec, weights, kernels)
        # Folders keep a norm's weights as their distance from one; the sum would lose digits in half precision.
        self._norms = [{name: 1.0 + weight.float() for name, weight in layer.norms.items()} for layer in weights.layers]
        self._last_norm = 1.0 + weights.norm.float()
        # Rounded as the model was trained.
        self._embedding_scale = torch.tensor(spec.hidden_size**0.5, dtype=weights.embedding.dtype).item()

    def embed(self, step: DeviceStep) -> Tensor:
        return super().embed(step) * self._embedding_scale

    @torch.inference_mode()
    def forward(self, step: DeviceStep, cache: list[LayerCache]) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the tokens' keys and values into `cache`."""
        x = self.embed(step)
        for index, (layer, norms, kept) in enumerate(zip(self.weights.layers, self._norms, cache, strict=True)):
            qkv = self.project(layer.qkv, self.norm(x, norms[ATTENTION_NORM]), step, index, "qkv")
            attended = self.attend(qkv, step, kept, index, self.head_norms(norms))
            attended = self.project(layer.output, attended, step, index, "o")
            x = x + self.norm(attended, norms[ATTENDED_NORM])
            given = self.feed_forward(layer, self.norm(x, norms[MLP_NORM]), step, index)
            x = x + self.norm(given, norms[MLP_OUTPUT_NORM])
        return self.norm(x, self._last_norm)

    def feed_forward(self, layer: LayerWeights, x: Tensor, step: DeviceStep, index: int) -> Tensor:
        """The gated MLP with gelu."""
        gate, up = self.project(layer.gate_up, x, step, index, "gate_up").chunk(2, dim=-1)
        return self.project(layer.down, functional.gelu(gate, approximate="tanh") * up, step, index, "down")

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None, lora: LoraBatch | None = None) -> Tensor:
        logits, cap = super().logits(hidden, out, lora), self.spec.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


FAMILY = Family(ARCHITECTURE, read, Gemma3Model)
