"""Sites are the four matrix products of a layer that adapters change; PEFT has names for their parts."""

from __future__ import annotations

from dataclasses import dataclass

from rota.engine.model.spec import ModelSpec

SITES = ("qkv", "o", "gate_up", "down")

# The parent module of each of a layer's seven matrices.
PARENTS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


@dataclass(frozen=True, slots=True)
class SiteShape:
    """One stacked projection: its inputs, and the outputs of each of its parts."""

    name: str
    inputs: int
    parts: tuple[tuple[str, int], ...]  # ("q_proj", heads * head_dim), …
    has_bias: bool = False  # of the model

    @property
    def outputs(self) -> int:
        return sum(width for _, width in self.parts)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(width for _, width in self.parts)


def site_shapes(spec: ModelSpec) -> tuple[SiteShape, ...]:
    """The sites of each layer, in the order of SITES."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = (
        SiteShape("qkv", hidden, (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)), spec.has_qkv_bias),
        SiteShape("o", queries, (("o_proj", hidden),), spec.has_output_bias),
        SiteShape("gate_up", hidden, (("gate_proj", width), ("up_proj", width)), spec.has_mlp_bias),
        SiteShape("down", width, (("down_proj", hidden),), spec.has_mlp_bias),
    )
    assert tuple(shape.name for shape in shapes) == SITES
    return shapes


def module_name(layer: int, part: str) -> str:
    """The name of a part of a layer in transformers and PEFT."""
    return f"model.layers.{layer}.{PARENTS[part]}.{part}"


def module_names(layers: int) -> list[str]:
    """Every module of a model that an adapter may change."""
    return [module_name(layer, part) for layer in range(layers) for part in PARENTS]
